"""The agent: one call of the model for each message, by OpenAI's own client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from examples.common import running
from examples.inbox.messages import Message, right_fields, share
from journeywork import Trajectory

MODEL = "inbox"
MAX_TOKENS = 28
"""The right answer has about 20."""


async def ask(agent: openai.AsyncOpenAI, model: str, message: Message, *, temperature: float) -> ChatCompletion:
    """Ask the model for a message's team, urgency and order."""
    prompt: list[Any] = message.prompt
    return await agent.chat.completions.create(
        model=model, messages=prompt, temperature=temperature, max_tokens=MAX_TOKENS
    )


@dataclass
class Sorter:
    """Agents that sort messages, and what the demo shows of their work."""

    answers: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Answers to held-out messages, by message and version."""
    solved: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """For each policy step, whether all fields were right, in training."""
    train_s: float = 0.0
    """Seconds of training."""
    usage: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each service took, as `running.Installation.usage` returns it."""

    def rollout(
        self, *, training: bool, reports: bool = True
    ) -> Callable[[Trajectory, Message], Awaitable[float | None]]:
        """Return a rollout that sorts one message: by sampling in training, else by the most probable tokens. Its
        reward is the share of the fields that are right, if it `reports` one."""

        async def sort(run: Trajectory, message: Message) -> float | None:
            """Ask for the fields of a message, and record the answer. Returns the reward; `None` for no report."""
            reply = await ask(running.agent(run), run.model, message, temperature=float(training))
            answer = reply.choices[0].message.content or ""
            right = right_fields(message, answer)
            run.metrics = right
            run.metadata = {"message": message.text, "answer": answer}
            if training:
                self.solved[int(reply.model.rpartition("@")[2])].append(right["solved"])
            else:
                self.answers[message.id][reply.model] = answer
            return share(right) if reports else None

        return sort
