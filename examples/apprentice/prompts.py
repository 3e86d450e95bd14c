"""What words add, beside weights: `journeywork prompt` for the base model and for the last version.

    pip install gepa==0.1.4
    python -m examples.apprentice.prompts runs/apprentice

`runs/apprentice` is a finished run of `examples.apprentice.demo`. The writer of prompts is a stand-in: a program that
writes what an attentive person would, the names of teams and urgencies, and right answers to messages that were
answered wrongly. Prints, and writes to `<run-dir>/prompts.json`: share of held-out messages solved by each version with
the agent's own prompt and with the best one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import openai

from examples.apprentice.takeover import AT_MOST, FROM
from examples.common import stand_in
from examples.common.running import JOURNEYWORK, ROOT, ExampleError, Installation, add_flags, as_program, flags
from examples.inbox import demo
from examples.inbox.agent import MAX_TOKENS
from examples.inbox.messages import PROBLEMS, SYSTEM, URGENCIES, Message, message, right_fields, share
from examples.inbox.report import say
from journeywork import Trajectory

HELD_OUT = [message("held_out", number) for number in range(252)]
TASKS = [message("train", FROM + AT_MOST + number) for number in range(60)]
"""Messages on which prompts are tried."""
PROMPT_TOKENS = 768
EXAMPLES = 6
"""The most examples in a prompt."""
_HERE = "examples.apprentice.prompts"
_PROMPT_OF_GEPA = re.compile(r"```\n(.*?)\n```", re.S)


async def play(run: Trajectory, task: Message) -> float:
    """The rollout of `journeywork prompt`: ask for a message's team, urgency and order with the prompt on trial,
    `run.prompt`, decoded greedily. Returns the share of right fields."""
    messages: list[Any] = [{"role": "system", "content": run.prompt}, {"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key, timeout=600) as agent:
        reply = await agent.chat.completions.create(
            model=run.model, messages=messages, temperature=0, max_tokens=MAX_TOKENS
        )
    answer = reply.choices[0].message.content or ""
    right = right_fields(task, answer)
    run.metrics = right
    run.metadata = {"message": task.text, "answer": answer}
    return share(right)


def better_prompt(request: str) -> str:
    """Return the stand-in's answer to GEPA's request for a better prompt. The request shows the present prompt and
    attempts with it. Raises `ValueError` for another request."""
    present = _PROMPT_OF_GEPA.search(request)
    shown = [task for task in TASKS if task.text in request]
    if present is None or not shown:
        raise ValueError("this is no request for a prompt of the inbox")
    earlier = [task for task in TASKS if task.text in present[1]]
    examples = list(dict.fromkeys([*earlier, *shown]))
    if len(examples) > EXAMPLES:
        examples = random.Random(request).sample(examples, EXAMPLES)
    lines = [
        SYSTEM,
        f"team is one of {', '.join(sorted(PROBLEMS))}. urgency is one of {', '.join(sorted(URGENCIES))}.",
        "order is the number with four digits. Write nothing but the JSON.",
        *(f"Message: {example.text}\nAnswer: {example.right}" for example in examples),
    ]
    return "```\n" + "\n".join(lines) + "\n```"


@contextmanager
def writer() -> Iterator[str]:
    """Serve the stand-in while the block runs, and yield what `--by` takes."""
    with stand_in.serving(lambda messages: better_prompt(str(messages[-1]["content"]))) as url:
        yield f"{url}#writer"


def compare(version: str, by: str, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Let `journeywork prompt` improve the prompt of a version. Return the rates of solved held-out messages with the
    agent's own prompt and with the best one. `by`: address of the writer of prompts; `url`: of the gateway."""
    folder = args.run_dir / "prompts"
    folder.mkdir(exist_ok=True)
    (folder / "agent.txt").write_text(SYSTEM, "utf-8")
    command = [JOURNEYWORK, "prompt", version, "--prompt", str(folder / "agent.txt"), "--by", by, "--json"]
    command += ["--rollout", f"{_HERE}:play", "--scenarios", f"{_HERE}:TASKS", "--url", url]
    command += ["--held-out", f"{_HERE}:HELD_OUT", "--runs", str(args.runs), "--seed", str(args.seed)]
    command += ["--out", str(folder / f"{version}.txt"), "--concurrency", "32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExampleError(f"journeywork prompt failed:\n{done.stderr[-3000:]}")
    report = json.loads(done.stdout)
    solved = [next(m for m in entrant["measures"] if m["name"] == "solved") for entrant in report["entrants"]]
    rates = [{"value": s["mean"], "ci95": [s["low"], s["high"]]} for s in solved]
    difference = {name: solved[-1].get(name) for name in ("difference", "difference_low", "difference_high")}
    return {"version": version, "own": rates[0], "best": rates[-1], "better": report["better"], **difference}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="run directory of a finished `make apprentice`")
    parser.add_argument("--runs", type=int, default=240, help="runs for the choice of each version's prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", type=Path, help="the base model, if it is another one than the demo's")
    add_flags(parser)
    return parser.parse_args(argv, argparse.Namespace(steps=1))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.run_dir = args.run_dir.absolute()
    with as_program(args.run_dir):
        if importlib.util.find_spec("gepa") is None:
            raise ExampleError("journeywork prompt needs GEPA: pip install gepa==0.1.4")
        last = json.loads((args.run_dir / "report.json").read_text())["versions"]["rl"]
        settings = {**demo.settings_of(args), "vllm.max_model_len": PROMPT_TOKENS}
        services = ("--services", "gateway,sampler,store")
        with Installation(args.run_dir, demo.SETTINGS, settings, *services, *flags(args)) as up, writer() as by:
            url, rows = anyio.run(up.ready), []
            for version in (demo.BASE, last):
                say(f"journeywork prompt {version} …")
                rows.append(compare(version, by, url, args))
    report = json.dumps(rows, indent=1)
    (args.run_dir / "prompts.json").write_text(f"{report}\n", "utf-8")
    print(report)


if __name__ == "__main__":
    main()
