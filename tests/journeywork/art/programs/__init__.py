"""Programs that other people wrote for ART, fetched by name and digest: nothing of them is kept here.

Each is published under the Apache License 2.0 or the MIT licence. `changes` are the only edits beside the import lines:
counts that make two steps of them; names of models, addresses and data sets, which no program can know of this
machine."""

import hashlib
import json
import os
import re
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ART, MLX, NOTEBOOKS = "xde-mcp/ART", "menonpg/art-mlx", "OpenPipe/art-notebooks"
MATH = "BY571/openpipe-math500"
SOURCES = json.loads(Path(__file__).with_name("sources.json").read_text())
"""By repository: the commit, and the SHA-256 digest of each file."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "journeywork" / "programs"


@dataclass(frozen=True)
class Program:
    """The first of `files` is run, in a folder with the others."""

    repo: str
    files: tuple[str, ...]
    """Paths in the repository."""
    model: str
    """The name under which the program trains its model."""
    replies: tuple[str, ...]
    """The double answers with one of them."""
    changes: tuple[tuple[str, str], ...] = ()
    """Regular expressions, each of which matches in one file at least, and what stands in place of what they match."""
    env: dict[str, str] = field(default_factory=dict)


def tool_call(name: str, **arguments: object) -> str:
    """A reply that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def moves(squares: str) -> tuple[str, ...]:
    return tuple(f"<move>{square}</move>" for square in squares.split())


BASE = (r'^BASE_MODEL = ".*?"', 'import os\n\nBASE_MODEL = os.environ["BASE_MODEL"]')
NO_GPU = (r"torch\.cuda\.get_device_properties\(0\)\.major", "8")
TRAIN_GAMES = ((r"WINNING_VALUE = \d+", "WINNING_VALUE = 16"), (r"range\(18\)", "range(8)"))
ANSWERS = ("yes", "no", "maybe")
SQUARES = moves("A1 A2 A3 B1 B2 B3 C1 C2 C3")
PROGRAMS = {
    "yes-no-maybe": Program(
        MLX, ("dev/yes-no-maybe.py",), "012", ANSWERS, ((r"range\(32\)", "range(3)"),), {"NUM_STEPS": "2"}
    ),
    "math-500": Program(
        MATH,
        ("math_500.py",),
        "math-500-agent",
        (
            tool_call("run_python_code", code="print(np.sum([2, 2]))"),
            tool_call("return_final_answer", answer="4", reference_message_ids=["1"]),
            "I do not know.",
        ),
        (
            (r'f"math-500-agent-.*"', '"math-500-agent"'),
            ('"max_steps": 20', '"max_steps": 1'),
            (
                r'load_dataset\(".*\)',
                'Dataset.from_list([{"problem": f"{n} + {n}", "answer": str(2 * n), '
                '"unique_id": str(n)} for n in range(2)])',
            ),
        ),
    ),
    "sft-rl-notebook": Program(
        NOTEBOOKS,
        ("examples/sft/sft-rl.ipynb",),
        "summarizer-002",
        ("It is short.", "It is long."),
        (
            ("from async_lru import alru_cache", "alru_cache = lambda **_: lambda function: function"),
            (r'_API_KEY"\] = ""', '_API_KEY"] = "none"'),
            (r'"https://[a-z./]+/v1"', 'os.environ["OPENAI_BASE_URL"]'),
            ("val_size: int = 91, train_size: int = 3500", "val_size=1, train_size=24"),
            ("EXAMPLES = 200", "EXAMPLES = 4"),
            ("STEPS = 1000", "STEPS = 2"),
            (
                r'load_dataset\(".*\)',
                '{"repliqa_0": [{"document_id": n, "document_extracted": f"Document {n}.", '
                '"question": "Is it short?", "answer": "Yes."} for n in range(25)]}',
            ),
        ),
        {"WANDB_MODE": "disabled"},
    ),
    "distillation-notebook": Program(
        NOTEBOOKS,
        ("examples/sft/distillation.ipynb",),
        "distillation-text-to-sql",
        ("SELECT 1", "SELECT 2", "SELECT name FROM products"),
        (
            (r'API_KEY = ""', 'API_KEY = "none"'),
            (r'"https://[a-z./]+/v1"', 'os.environ["OPENAI_BASE_URL"]'),
            ("epochs=3", "epochs=1"),
            ("STEPS = 3", "STEPS = 1"),
        ),
        {"WANDB_MODE": "disabled"},
    ),
    "yes-no-maybe-metrics": Program(
        MLX,
        ("dev/yes-no-maybe-metrics.py",),
        "metrics",
        ANSWERS,
        (),
        {"MODEL_NAME": "metrics", "NUM_STEPS": "2", "ROLLOUTS_PER_PROMPT": "3", "EVAL_PROMPTS": "4"},
    ),
    "yes-no-maybe-kl-advantage": Program(
        MLX,
        ("dev/yes-no-maybe-kl-advantage.py",),
        "kl",
        ANSWERS,
        ((r"range\(32\)", "range(3)"),),
        {"MODEL_NAME": "kl", "NUM_STEPS": "2"},
    ),
    "sft-warmup": Program(
        MLX,
        ("dev/sft/sft-warmup.py",),
        "sft-warmup-",
        ANSWERS,
        ((r"k=8", "k=0"), (r"range\(10\)", "range(1)"), (r"\] \* 100", "] * 2")),
    ),
    "2048": Program(
        ART,
        ("examples/2048/train.py", "examples/2048/rollout.py", "examples/2048/utils.py"),
        "tutorial-001",
        moves("left right up down"),
        (
            ("TRAIN_STEPS = 40", "TRAIN_STEPS = 2"),
            ("SIMULTANEOUS_GAMES = 18", "SIMULTANEOUS_GAMES = 4"),
            ("WINNING_VALUE = 128", "WINNING_VALUE = 16"),
        ),
    ),
    "2048-ruler-notebook": Program(
        NOTEBOOKS,
        ("examples/2048/2048-ruler.ipynb",),
        "agent-002",
        moves("left right up down"),
        (*TRAIN_GAMES, (", 10\\):", ", 2):"), ('OPENAI_API_KEY = ""', 'OPENAI_API_KEY = "none"')),
    ),
    "auto-rl-notebook": Program(
        NOTEBOOKS,
        ("examples/auto_rl.ipynb",),
        "grammarly-model-001",
        ("I am.", "I are.", "I is.", "<original>are</original><corrected>am</corrected>"),
        (
            BASE,
            NO_GPU,
            ('OPENROUTER_API_KEY = ""', 'OPENROUTER_API_KEY = "none"'),
            ('inputs": 25', 'inputs": 2'),
            ('num_epochs": 3', 'num_epochs": 2'),
            ("TEST_INPUTS = 5", "TEST_INPUTS = 2"),
        ),
    ),
    "pipeline": Program(
        MLX,
        ("src/art/pipeline_trainer/yes_no_maybe_pipeline.py",),
        "pipeline-yes-no-maybe-",
        ANSWERS,
        (
            (r"^from \. import", "from journeywork.art.pipeline_trainer import"),
            (r"\{datetime.*?\)\}", ""),
            ("SCENARIO = 32", "SCENARIO = 4"),
            ("MAX_STEPS = 20", "MAX_STEPS = 2"),
            ("COUNT = 30", "COUNT = 3"),
        ),
        {"TINKER_API_KEY": "none"},
    ),
    "trainability": Program(
        MLX,
        ("dev/yes_no_maybe_trainability.py",),
        "trained",
        ANSWERS,
        (),
        {
            "MODEL_NAME": "trained",
            "NUM_STEPS": "2",
            "ROLLOUTS_PER_PROMPT": "3",
            "EVAL_PROMPTS": "2",
            "BACKEND": "megatron",
            "ART_PATH": "art",
        },
    ),
    "tic-tac-toe": Program(
        ART,
        tuple(f"examples/tic_tac_toe/{name}.py" for name in ("tic-tac-toe", "rollout", "game_utils")),
        # Of 48 games some have a legal first move: four in five games end with the first one.
        "llama-8b-007",
        SQUARES,
        ((r"range\(96\)", "range(48)"), ("STEP = 50", "STEP = 2")),
    ),
    "tic-tac-toe-notebook": Program(
        NOTEBOOKS,
        ("examples/tic_tac_toe/tic-tac-toe.ipynb",),
        "001-script",
        SQUARES,
        (("ROLLOUTS_PER_STEP = 48", "ROLLOUTS_PER_STEP = 8"),),
    ),
    "tic-tac-toe-self-play": Program(
        ART,
        tuple(
            f"examples/tic_tac_toe_self_play/{name}.py"
            for name in ("train", "rollout", "game_utils", "gather_trajectory_groups_by_index")
        ),
        "llama-8b-student-001",
        SQUARES,
        (
            (r"range\(96\)", "range(8)"),
            (r"range\(10\)", "range(2)"),
            ("STEP = 300", "STEP = 2"),
            (r'"https://api\.openai\.com/v1"', 'os.environ["OPENAI_BASE_URL"]'),
        ),
    ),
    "prisoners-dilemma": Program(
        ART,
        ("examples/prisoners-dilemma.ipynb",),
        "001",
        ("Cooperate", "Defect", "Well"),
        (BASE, (r"1_000", "2"), (r"_ROUNDS = 10", "_ROUNDS = 2"), (r"range\(8\)", "range(4)")),
    ),
    "rock-paper-tool-use": Program(
        ART,
        ("examples/rock-paper-tool-use.ipynb",),
        "001",
        tuple(tool_call("play_move", move=move) for move in ("rock", "paper", "scissors")),
        (BASE, (r"1_000", "2"), (r"range\(64\)", "range(8)"), (r"range\(10\)", "range(4)")),
    ),
}


def fetch(repo: str, path: str) -> str:
    """Return a file of a public repository, from the cache or from GitHub. Raises `OSError` if it can't be had, and
    `ValueError` if it is not the file that it was."""
    commit, digest = SOURCES[repo]["commit"], SOURCES[repo]["files"][path]
    kept = CACHE / digest
    if not kept.is_file():
        address = f"https://raw.githubusercontent.com/{repo}/{commit}/{path}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            body = answer.read()
        if hashlib.sha256(body).hexdigest() != digest:
            raise ValueError(f"{address} does not have the digest {digest}")
        CACHE.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(body)
    return kept.read_text()


def write(program: Program, folder: Path) -> Path:
    """Write the changed files of a program into a folder. Returns the file to run. Raises as `fetch` does."""
    imports = (
        (r"^( *)import art$", r"\1import journeywork.art as art"),
        (r"^( *)from art\b", r"\1from journeywork.art"),
    )
    missed = {pattern for pattern, _ in program.changes}
    files = []
    for path in program.files:
        text = fetch(program.repo, path)
        if path.endswith(".ipynb"):
            text = cells(text)
        for pattern, replacement in (*imports, *program.changes):
            text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            missed -= {pattern} if count else set()
        files.append(folder / Path(path).with_suffix(".py").name)
        files[-1].write_text(text)
    assert not missed, f"nothing to change: {missed}"
    return files[0]


def cells(notebook: str) -> str:
    """The code of a notebook, without cells for the shell, for IPython and for a GPU."""
    sources = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(source for source in sources if not re.search(r"^ *[%!]|^ *from unsloth", source, re.MULTILINE))
