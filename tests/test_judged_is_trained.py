"""What is judged is what is trained: of the same exchanges, every trained token's text stands in the judge's prompt,
in order.

An agent is simulated at the level of words: each word is one token, each reply has words of its own. It asks for
several choices, calls sub-agents, shortens its history, sends replies back without their reasoning, gives up calls
and asks beside the task. The trainer makes sequences of what the gateway would have recorded, the judge makes a
prompt, and the two are compared."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from judge.ruler import prompt
from judge.ruler.rubrics import load_rubric
from judge.ruler.transcripts import from_exchanges
from pipeline.events import ExchangeRecorded
from tests.kits.events import exchange
from trainer.sequences import TokenSequence, build

Message = dict[str, Any]
ROOM = 10_000_000


class Words:
    """A tokenizer whose tokens are words."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._fresh = itertools.count()

    def fresh(self, count: int) -> str:
        """Words that no one said before."""
        return " ".join(f"w{next(self._fresh)}w" for _ in range(count))

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(w, len(self.ids)) for w in text.split()]

    def trained(self, sequence: TokenSequence) -> list[str]:
        words = list(self.ids)
        return [words[i] for i, t in zip(sequence.ids, sequence.loss_mask, strict=True) if t and words[i][0] == "w"]


class Agent:
    """Makes the exchanges of one trajectory."""

    def __init__(self, words: Words, seed: int) -> None:
        self.words, self.rng = words, random.Random(seed)
        self.exchanges: list[ExchangeRecorded] = []
        self._seq = itertools.count()
        self._strips = self.rng.random() < 0.5
        """The chat template leaves reasoning out of earlier turns, as Qwen3's does."""

    def _template(self, messages: list[Message]) -> str:
        return " ".join(f"<{m['role']}> {self._said(m, old=True)} <end>" for m in messages) + " <assistant>"

    def _said(self, message: Message, *, old: bool = False) -> str:
        reasoning = "" if old and self._strips else message.get("reasoning_content") or ""
        calls = [c["function"]["arguments"] for c in message.get("tool_calls") or ()]
        return " ".join(("<think>", reasoning, "</think>", message["content"] or "", *("<call> " + c for c in calls)))

    def _reply(self) -> Message:
        message: Message = {"role": "assistant", "content": self.words.fresh(self.rng.randint(1, 60))}
        if self.rng.random() < 0.4:
            message["reasoning_content"] = self.words.fresh(self.rng.randint(1, 60))
        if self.rng.random() < 0.3:
            name = {"name": "look", "arguments": self.words.fresh(3)}
            message |= {"tool_calls": [{"id": "c", "type": "function", "function": name}], "content": None}
        return message

    def call(self, messages: list[Message], n: int = 1, **fields: Any) -> list[Message]:
        """`n` replies, each an event."""
        seq, replies = next(self._seq), [self._reply() for _ in range(n)]
        for choice, reply in enumerate(replies):
            sampled = self.words.encode(self._said(reply) + " <end>")
            prompt, request = self.words.encode(self._template(messages)), msgspec.json.encode({"messages": messages})
            response = msgspec.json.encode({"choices": [{"message": reply}]})
            of_call = {"choice": choice, "request": request, "response": response, **fields}
            self.exchanges.append(exchange("t", seq, prompt, sampled, **of_call))
        return replies

    def sent_back(self, reply: Message) -> Message:
        if self.rng.random() < 0.5:
            reply = {k: v for k, v in reply.items() if k != "reasoning_content"}
        return {**reply, "content": reply["content"] or ""} if self.rng.random() < 0.5 else reply

    def run(self, turns: int, deep: bool = True) -> None:
        history: list[Message] = [{"role": "user", "content": "Task " + self.words.fresh(3)}]
        for _ in range(turns):
            match self.rng.randrange(8) if deep else 7:
                case 0:
                    reply = self.rng.choice(self.call(history, n=self.rng.randint(2, 4)))
                case 1:
                    self.run(2, deep=False)  # a sub-agent
                    (reply,) = self.call(history)
                case 2:
                    history = [history[0], {"role": "user", "content": "Summary"}, *history[-2:]]
                    (reply,) = self.call(history)
                case 3:
                    self.call(history, status="cancelled")
                    (reply,) = self.call(history)
                case 4:
                    self.call([*history, {"role": "user", "content": "Title?"}], side_call=True)
                    (reply,) = self.call(history)
                case 5:
                    self.call(history)  # asked twice, the first reply thrown away
                    (reply,) = self.call(history)
                case _:
                    (reply,) = self.call(history)
            history = [*history, self.sent_back(reply), {"role": "tool", "content": self.words.fresh(2)}]


def scenarios() -> Iterator[tuple[Words, list[list[ExchangeRecorded]]]]:
    for seed in range(60):
        words = Words()
        agents = [Agent(words, 100 * seed + i) for i in range(3)]
        for agent in agents:
            agent.run(agent.rng.randint(1, 8))
        yield (
            words,
            [[msgspec.structs.replace(e, trajectory=f"t{i}") for e in a.exchanges] for i, a in enumerate(agents)],
        )


@pytest.mark.parametrize("part", range(3))
def test_every_trained_reply_is_in_the_judge_s_prompt(part: int) -> None:
    several = 0
    for words, group in itertools.islice(scenarios(), part, None, 3):
        transcripts = [from_exchanges(f"t{i}", exchanges) for i, exchanges in enumerate(group)]
        asked = prompt.build_prompt(transcripts, load_rubric(), random.Random(1), ROOM)
        assert asked.left_out == 0
        shown = asked.messages[1]["content"].split()
        place: dict[str, int] = {}
        for number, word in enumerate(shown):
            place.setdefault(word, number)
        for number, exchanges in enumerate(group):
            sequences = build(f"t{number}", exchanges)
            several += len(sequences) > 1
            for sequence in sequences:
                trained = words.trained(sequence)
                assert trained
                assert not [w for w in trained if w not in place]
                assert [place[w] for w in trained] == sorted(place[w] for w in trained)
    assert several > 10  # else the test would show little
