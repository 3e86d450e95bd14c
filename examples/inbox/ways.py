"""Where the demo's rewards come from: `--way function`, `judge` or `job`.

`function`: the agent reports the share of right fields. `judge`: nobody reports anything; a judge compares the eight
answers to a message by the rubric. `job`: each message comes once, and another program tells later how good the
answer was (`--delay`); the gateway finds the runs by their calls. With `--words` it also says of a wrong answer, as a
user would, what was right: a hint, with which the policy itself is the teacher of what it said without.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import openai

from examples.common import stand_in
from examples.common.late_results import Desk, new_keys, open_desk, settings_on_the_job
from examples.inbox.agent import MODEL, Sorter, ask
from examples.inbox.messages import Message, message, right_fields, share
from journeywork import AsyncJourneywork, LoopOptions, loop

RUBRIC = Path(__file__).with_name("rubric.md")
GROUP_SIZE = 8
GROUPS_PER_STEP = 12
HINT_WEIGHT = 0.1
"""`trainer.distill.weight` with words."""
MESSAGES = 20_000
"""Training messages; more than a run answers."""
IDLE_S = 5.0
"""With `--way job`: time without a call after which a run is over for the gateway."""
_ORDER = re.compile(r"\b\d{4}\b")


@dataclass(frozen=True)
class Way:
    """One of the ways, for one run of the demo."""

    name: str
    delay_s: float = 0.0
    """Seconds from an answer to its result."""
    words: bool = False
    """Whether wrong answers get words beside the result."""
    settings: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def operator(self) -> str:
        """The key of the demo's own client; empty where the gateway has no keys."""
        return self.keys.get("operator", "")

    async def play(
        self, client: AsyncJourneywork, sorter: Sorter, messages: list[Message], options: LoopOptions[Message]
    ) -> None:
        """Sort messages until the last step is served; on the job until this is cancelled."""
        if self.name == "job":
            async with open_desk(client.url, self.keys["results"], self.delay_s) as desk:
                await _work(client.url, self, sorter, messages, options.concurrency, desk)
        else:
            training = sorter.rollout(training=True, reports=self.name == "function")
            await loop(client, MODEL, messages, training, options)


@contextlib.contextmanager
def way_of(name: str, args: argparse.Namespace) -> Iterator[Way]:
    """Yield where the rewards come from, by the name after `--way`. For `judge`, a stand-in for a judge model is served
    within the block, unless the flags name a model."""
    if name == "function":
        yield Way(name)
    elif name == "job":
        keys = new_keys()
        settings = settings_on_the_job(keys, args.delay, IDLE_S) | {
            "trainer.max_staleness": 24,
            "trainer.groups_per_step": GROUPS_PER_STEP * GROUP_SIZE,
        }
        if args.words:
            settings["trainer.distill.weight"] = HINT_WEIGHT
        yield Way(name, args.delay, args.words, settings, keys)
    else:
        rubric = {"judge.rubric": str(RUBRIC)}
        if any(setting.startswith("judge.model=") for setting in args.set):
            yield Way(name, settings=rubric)
            return
        print("the judge is a stand-in: a program that knows the right answers (--set judge.model=… names a model)")
        with stand_in.judging(scoring(message("train", n, args.seed) for n in range(MESSAGES))) as judge:
            yield Way(name, settings=rubric | judge)


def scoring(messages: Iterable[Message]) -> stand_in.Score:
    """Return the scoring function of a stand-in: it finds the one of `messages` that an attempt answers, and returns
    the share of right fields."""
    by_order = defaultdict(list)
    for known in messages:
        by_order[known.order].append(known)

    def score(context: str, attempt: str) -> float:
        """Return the share of right fields of an attempt, as `stand_in.Score` describes."""
        question, _, answer = attempt.partition("[assistant]")
        prompt = context + question
        orders = {int(number) for number in _ORDER.findall(prompt)}
        answered = [known for order in orders for known in by_order[order] if known.text in prompt]
        if not answered:
            raise ValueError("this is no answer to a message of the inbox")
        return share(right_fields(answered[0], answer))

    return score


async def _work(gateway: str, way: Way, sorter: Sorter, messages: list[Message], at_once: int, desk: Desk) -> None:
    """Answer each message once, with an unmodified OpenAI client, and hand the results to `desk`."""
    agent = openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=way.keys["agent"], max_retries=8, timeout=120)
    unread = iter(messages)

    async def worker() -> None:
        """Answer one message after the other, and hand over the results."""
        for m in unread:
            reply = await ask(agent, MODEL, m, temperature=1.0)
            right = right_fields(m, reply.choices[0].message.content or "")
            sorter.solved[int(reply.model.rpartition("@")[2])].append(right["solved"])
            right_answer = f"The team is {m.team}, the urgency {m.urgency}, the order {m.order}."
            words = f"That is wrong. {right_answer}" if way.words and not right["solved"] else ""
            await desk.report(reply.id, share(right), words)

    async with agent, anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(worker)
