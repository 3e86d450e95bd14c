"""Learning on the job: agents name no run, and a desk reports results a while after they ended, as another program
than the agent would: a shop's order desk, a test suite, a customer.

    python -m examples.common.late_results --gateway URL [--delay 60]

is the desk. It reads a line of JSON for each run from standard input: `{"answer": id of an answer of the run, "result":
number, "ended": Unix time}`, and perhaps `"words"`, what somebody says about the answer. It knows a run by nothing
else. At the end of its input, once all results are reported, it writes how many were taken and how many refused."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteSendStream, Process

from examples.common.running import ROOT
from journeywork import AsyncJourneywork, JourneyworkError

NAME = "result"
"""Name of the signal, and of the reward that it becomes."""
AT_ONCE = 16
"""Results that are posted at the same time."""
_ROLES = {"agent": "agent", "results": "feedback", "operator": "operator"}


def new_keys() -> dict[str, str]:
    """Return an API key for each of the agents, the desk (`results`) and the operator."""
    return {name: secrets.token_urlsafe(24) for name in _ROLES}


def settings_on_the_job(keys: dict[str, str], delay_s: float, idle_s: float) -> dict[str, Any]:
    """Return what an installation sets whose agents name no run, and whose results come `delay_s` seconds late.
    `idle_s`: seconds without a call after which a run is over."""
    return {
        "gateway.keys": [
            {"name": name, "role": _ROLES[name], "sha256": hashlib.sha256(key.encode()).hexdigest()}
            for name, key in keys.items()
        ],
        # A run begins and ends where its messages say so, and is a group of one.
        "gateway.detection.enabled": True,
        "gateway.detection.grouped": False,
        "gateway.detection.idle_s": idle_s,
        "judge.group_size": 1,
        "judge.min_size": 1,
        # The reward is what somebody reports; a run waits for it.
        "judge.rewards": [{"name": NAME, "kind": "feedback"}],
        "feedback.wait_s": 10 * delay_s + 60,
        # A run is compared with the others of its step, and was sampled by a version of a minute ago.
        "trainer.loss.baseline": "batch",
        "trainer.loss.importance_sampling": "sequence_truncate",
    }


@contextlib.asynccontextmanager
async def open_desk(gateway: str, key: str, delay_s: float) -> AsyncIterator[Desk]:
    """Start the desk with an API key, and yield it; it ends with the block."""
    command = [sys.executable, "-m", "examples.common.late_results", "--gateway", gateway, "--delay", str(delay_s)]
    environment = {**os.environ, "JOURNEYWORK_API_KEY": key}
    async with await anyio.open_process(command, env=environment, cwd=ROOT, stderr=None) as process:
        try:
            yield Desk(process)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have died, which says why already
                process.terminate()


class Desk:
    """The running desk."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: ByteSendStream = process.stdin
        self._stdout, self._sending = process.stdout, anyio.Lock()

    async def report(self, answer: str, result: float, words: str = "") -> None:
        """Hand over the result of the run that has just ended. `answer`: id of the run's last answer."""
        line = json.dumps({"answer": answer, "result": result, "ended": time.time(), "words": words})
        async with self._sending:
            await self._stdin.send(f"{line}\n".encode())

    async def finish(self) -> dict[str, int]:
        """Wait until all results are reported. Returns how many the gateway took and refused."""
        await self._stdin.aclose()
        return dict(json.loads(b"".join([part async for part in self._stdout])))


async def report(gateway: str, delay_s: float) -> dict[str, int]:
    """Post the result of each run from standard input when it is due. Return how many the gateway took and refused.

    A gateway that is away or overloaded is asked again, for two minutes. Only the first refusal is printed: the others
    mostly have the same cause."""
    counts = {"taken": 0, "refused": 0}
    limit = anyio.CapacityLimiter(AT_ONCE)
    async with AsyncJourneywork(gateway, api_key=os.environ.get("JOURNEYWORK_API_KEY", "none")) as client:

        async def post(run: dict[str, Any]) -> None:
            """Post the result of a run when it is due, after the words about it."""
            await anyio.sleep(max(run["ended"] + delay_s - time.time(), 0.0))
            answer, result = run["answer"], run["result"]
            try:
                async with limit:
                    if words := run.get("words"):  # before the result, at which the run is scored
                        await client.feedback(answer, name="words", text=words, key=f"words/{answer}")
                    await client.feedback(answer, name=NAME, value=result, about="run", key=f"result/{answer}")
            except JourneyworkError as error:
                if not counts["refused"]:
                    print(f"refused: {error}", file=sys.stderr, flush=True)
                counts["refused"] += 1
            else:
                counts["taken"] += 1

        async with anyio.create_task_group() as tasks:
            # A read can't be stopped: an error of a post must not wait for the next line.
            while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
                tasks.start_soon(post, json.loads(line))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.common.late_results")
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--delay", type=float, default=60.0, help="seconds after the end of a run")
    args = parser.parse_args()
    print(json.dumps(anyio.run(report, args.gateway, args.delay)))


if __name__ == "__main__":
    main()
