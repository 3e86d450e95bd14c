"""Trains a policy on a public environment of verifiers, with prime-rl's recipe, by `journeywork.loop`.

    python -m examples.environments.demo reverse-text                       # on a GPU, as prime-rl does
    python -m examples.environments.demo reverse-text --small --dataset runs/texts    # SmolLM2-135M on two cores

The first start makes a Python environment for verifiers with uv, because verifiers needs other versions than the
services. `--environments` says where its environments come from: a checkout of verifiers, or its repository's address.
Prints the mean reward of the first and of the last step's episodes beside prime-rl's figure, and writes
`<run-dir>/report.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import anyio

from examples.common import packaged, running
from examples.environments.recipes import RECIPES, Recipe

SETTINGS = running.ROOT / "deploy" / "journeywork.toml"
VERIFIERS = "verifiers[ta]==0.4.0"
ENVIRONMENTS = "git+https://github.com/PrimeIntellect-ai/verifiers#subdirectory=environments/{folder}"
PYTHON_ENVIRONMENT = running.ROOT / "runs" / "verifiers"
HERE = Path(__file__).parent
EXAMPLES = 64
"""Right conversations of the warm start, with `--small`: SmolLM2 solves nothing before."""


def small(recipe: Recipe, base: str) -> Recipe:
    """Return the recipe in sizes for two cores, with the model `base`."""
    return dataclasses.replace(
        recipe,
        base=base,
        steps=min(recipe.steps, 8),
        groups_per_step=4,
        group_size=8,
        max_tokens=min(recipe.max_tokens, 64),
        max_model_len=1024,
        learning_rate=3e-4,
        rank=8,
    )


def settings_of(name: str, recipe: Recipe, *, on_gpu: bool) -> dict[str, Any]:
    """Return the installation's settings by their dotted names."""
    settings: dict[str, Any] = {
        "models.0.name": name,
        "models.0.base": recipe.base,
        "judge.group_size": recipe.group_size,
        "trainer.groups_per_step": recipe.groups_per_step,
        "trainer.max_steps": recipe.steps,
        "trainer.lora.rank": recipe.rank,
        "trainer.lora.alpha": 2.0 * recipe.rank,
        "trainer.optimizer.learning_rate": recipe.learning_rate,
        "vllm.max_model_len": recipe.max_model_len,
        "vllm.max_lora_rank": recipe.rank,
    }
    if not on_gpu:
        dtype = "bfloat16" if running.fast_bfloat16() else "float32"
        settings |= {
            "vllm.device": "cpu",
            "vllm.args": ["--dtype", dtype],
            "trainer.engine": "transformers",
            "trainer.dtype": dtype,
            "trainer.optimizer.max_grad_norm": 0.1,
        }
    return settings


def python_with(name: str, source: str) -> Path:
    """Return the Python of the environment that has verifiers, the environment `name` and the SDK. Makes it with uv if
    it is not there. Raises `ExampleError` if that fails."""
    python = PYTHON_ENVIRONMENT / "bin" / "python"
    folder = Path(source) / "environments" / name.replace("-", "_")
    package = str(folder) if folder.is_dir() else ENVIRONMENTS.format(folder=name.replace("-", "_"))
    commands = [["uv", "pip", "install", "--quiet", "--python", str(python), VERIFIERS, package, str(running.ROOT)]]
    if not python.exists():
        commands.insert(0, ["uv", "venv", "--quiet", str(PYTHON_ENVIRONMENT)])
    for command in commands:
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise running.ExampleError("uv is not installed: `pip install uv`") from None
        except subprocess.CalledProcessError as error:
            raise running.ExampleError(f"{' '.join(command)} failed; see above") from error
    return python


def run_play(python: Path, recipe: dict[str, Any]) -> Any:
    """Run `play.py` with a recipe, and return the JSON that it printed last. Raises `ExampleError` if it failed."""
    command = [python, HERE / "play.py"]
    done = subprocess.run(command, input=json.dumps(recipe), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise running.ExampleError(f"the rollouts ended with code {done.returncode}; see above")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--small", action="store_true", help="the demo's model, in sizes for two cores")
    parser.add_argument("--base", help="another model")
    parser.add_argument("--environments", default="", help="a checkout of verifiers; default: its repository on GitHub")
    parser.add_argument("--dataset", help="of reverse-text: a folder in place of the data set on the hub")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/environment"))
    running.add_flags(parser)
    args = parser.parse_args(argv)
    recipe = RECIPES[args.name]
    if args.small:
        recipe = small(recipe, args.base or str(packaged.make().absolute()))
    elif args.base:
        recipe = dataclasses.replace(recipe, base=args.base)
    if args.dataset:
        recipe = dataclasses.replace(recipe, taskset=recipe.taskset | {"dataset_name": args.dataset})
    run_dir: Path = args.run_dir.absolute()
    began = time.monotonic()
    with running.as_program(run_dir):
        python = python_with(args.name, args.environments)
        running.make_room(run_dir)
        settings = settings_of(args.name, recipe, on_gpu=not args.small)
        fields = {"name": args.name, **dataclasses.asdict(recipe)}
        if args.small and (solutions := run_play(python, fields | {"examples": EXAMPLES})):
            rows = [{"messages": messages} for messages in solutions]
            tuning = ("--epochs", "4", "--learning-rate", "1e-3", "--set", "trainer.threads=2")
            running.supervised_step(run_dir, SETTINGS, settings, running.flags(args), rows, *tuning)
        report = {"environment": args.name, "recipe": fields}
        with running.Installation(run_dir, SETTINGS, settings, *running.flags(args)) as up:
            report |= run_play(python, fields | {"gateway": anyio.run(up.ready)})
        report |= {"wall_s": round(time.monotonic() - began, 1), "prime_rl": RECIPES[args.name].reached}
        (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(
            f"{args.name}: mean reward {report['first_step']:.3f} in the first step's episodes, "
            f"{report['last_step']:.3f} in the last's ({report['episodes']} episodes, {report['wall_s']:.0f} s); "
            f"prime-rl, with its model: {report['prime_rl']}"
        )


if __name__ == "__main__":
    main()
