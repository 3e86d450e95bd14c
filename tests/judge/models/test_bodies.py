"""Any answer of a judge model with the status 200 ends in a group that is scored or discarded, and the judge lives."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio.from_thread
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from judge.groups import Group, key_of
from judge.models.chat import ModelError
from judge.models.judge_model import open_judge_model
from judge.rewards.compose import RULER, ConfiguredComposer
from judge.ruler.rubrics import load_rubric
from judge.ruler.ruler import LlmRuler
from judge.scoring import score_closed
from pipeline.config import JudgeConfig
from pipeline.events import GroupDiscarded, GroupScored, decode, encode
from pipeline.log.broker import LogEntry
from pipeline.log.messages import Place
from tests.judge.kit import IMPORTS_LITELLM, completed, loading, transcript
from tests.kits.scoring_server import Scorer, ScoringServer
from tests.kits.settings import with_values

pytestmark = IMPORTS_LITELLM

Path = tuple[str | int, ...]
FIELDS: list[Path] = [
    (),
    ("model",),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
    ("choices",),
    ("choices", 0),
    ("choices", 0, "finish_reason"),
    ("choices", 0, "message"),
    ("choices", 0, "message", "content"),
    ("choices", 0, "message", "role"),
]
HALF = "\ud83d"
texts = st.text(st.characters(exclude_categories=()), max_size=8) | st.just(HALF)
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**30), 10**30) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
parts = st.lists(st.sampled_from(["text", "thinking", "image"]).map(lambda kind: {"type": kind, "text": HALF}))
MEMBERS = [completed(name) for name in "ab"]
LOGGED = (LogEntry(event, "ROLLOUTS", Place(seq, 0), event.subject()) for seq, event in enumerate(MEMBERS, 1))
GROUP = Group(key_of(MEMBERS[0]), tuple(LOGGED))


PRICED = "openai/gpt-4o-mini"
"""litellm knows its price, and so what a server's counts of tokens would cost."""


class Bodies:
    """What the server answers next: a good body with some fields replaced, the explanations among them."""

    def __init__(self) -> None:
        self.fields: dict[Path, Any] = {}
        self.explanation = "well played"

    def __call__(self, request: dict[str, Any]) -> bytes:
        said = json.loads(str(Scorer()(request)))
        for entry in said["scores"]:
            entry["explanation"] = self.explanation
        body: Any = {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "scorer",
            "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": json.dumps(said)}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        for path, value in self.fields.items():
            body = _replaced(body, path, value)
        return json.dumps(body).encode()


def _replaced(document: Any, path: Path, value: Any) -> Any:
    """A copy with the value at `path`, if the document still has such a place."""
    if not path:
        return value
    if isinstance(document, list):
        return [_replaced(item, path[1:], value) if n == path[0] else item for n, item in enumerate(document)]
    if isinstance(document, dict) and isinstance(path[0], str):
        return {**document, path[0]: _replaced(document.get(path[0]), path[1:], value)}
    return document


Score = Callable[[], GroupScored | GroupDiscarded]


@contextmanager
def judged(bodies: Bodies) -> Iterator[Score]:
    """Scores the group over HTTP, once for each call."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opened(bodies)) as (config, composer),
    ):
        yield lambda: portal.call(score_closed, GROUP, config, "j", composer)


@asynccontextmanager
async def opened(bodies: Bodies) -> AsyncIterator[tuple[JudgeConfig, ConfiguredComposer]]:
    async with ScoringServer(bodies).run() as server:
        config = with_values(
            JudgeConfig(model=PRICED, api_base=server.url, retry_for_s=0.0, passes=1), {"request.retries": 0}
        )
        load = loading(transcript(m.trajectory, f"quality=0.{n}") for n, m in enumerate(MEMBERS))
        rulers = {"ruler": LlmRuler(config, load_rubric(), await open_judge_model(config), load)}
        yield config, ConfiguredComposer(config.replace(rewards=(RULER,)), rulers, {}, load)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_any_body_ends_in_an_event_that_the_log_can_hold() -> None:
    bodies = Bodies()
    with judged(bodies) as score:
        bodies.explanation = f"well {HALF}"
        event = score()
        assert isinstance(event, GroupScored)
        assert {m.trajectory: m.reward for m in event.members} == {"a": 0.0, "b": 0.1}
        assert {s.explanation for s in event.verdicts[0].scores} == {"well \ufffd"}

        @settings(max_examples=100, database=None)
        @given(st.dictionaries(st.sampled_from(FIELDS), values | parts, max_size=2), texts)
        @example({("choices", 0, "message", "content"): [{"type": "text", "text": "no"}]}, "")
        @example({("usage",): "many"}, "")
        @example({("usage", "prompt_tokens"): float("nan")}, "")
        @example({("usage", "prompt_tokens"): 10**400}, "")
        @example({("usage", "prompt_tokens"): -(10**9)}, "")
        def check(fields: dict[Path, Any], explanation: str) -> None:
            bodies.fields, bodies.explanation = fields, explanation
            event = score()
            assert decode(encode(event)) == event
            if isinstance(event, GroupScored):
                assert all(0 <= v.prompt_tokens + v.completion_tokens < 2**53 for v in event.verdicts)
                assert all(v.cost_usd >= 0 for v in event.verdicts)

        check()


async def test_a_body_that_never_ends_is_no_answer() -> None:
    """The client's own limit is one for each read."""

    async def drip(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n")
            while True:
                await stream.send(b" ")
                await anyio.sleep(0.02)  # the server's pace

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tg:
        tg.start_soon(listener.serve, drip)
        config = with_values(
            JudgeConfig(model="openai/scorer", api_base=f"http://127.0.0.1:{port}/v1"),
            {"request.timeout_s": 1.0, "request.retries": 0},
        )
        model = await open_judge_model(config)
        model._limit_s = 0.5
        with pytest.raises(ModelError, match="no whole reply within"):
            await model([{"role": "user", "content": "hello"}], None)
        tg.cancel_scope.cancel()
