"""The agent: one call of the model for each message, by OpenAI's own client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from examples.common import running
from examples.inbox.messages import Message, right_fields
from journeywork import Trajectory

MAX_TOKENS = 28
"""The right answer has about 20."""


@dataclass
class Sorter:
    """Agents that sort messages, and what they remember of it for the reader of the demo."""

    answers: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    """Answers to held-out messages, by message and version."""
    solved: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """For each policy step, whether all fields were right, in training."""
    train_s: float = 0.0
    """Seconds of training."""

    def rollout(self, *, training: bool) -> Callable[[Trajectory, Message], Awaitable[float]]:
        """Return a rollout that sorts one message: by sampling in training, else by the most probable tokens. Its
        reward is the share of the three fields that are right."""

        async def sort(run: Trajectory, message: Message) -> float:
            reply = await running.agent(run).chat.completions.create(
                model=run.model, messages=message.prompt, temperature=float(training), max_tokens=MAX_TOKENS
            )
            answer = reply.choices[0].message.content or ""
            right = right_fields(message, answer)
            run.metrics = right
            run.metadata = {"message": message.text, "answer": answer}
            if training:
                self.solved[int(reply.model.rpartition("@")[2])].append(right["solved"])
            else:
                self.answers[message.id][reply.model] = answer
            return (right["team"] + right["urgency"] + right["order"]) / 3

        return sort
