"""A promoted prompt in the bodies of all dialects: in place of the agent's own, and of nothing else."""

import json
from typing import Any

import pytest

from rollout_gateway.dialects.prompts import OriginalFields, read_original, with_prompt

OLD, NEW = "Play.", 'Play "well".\n'
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": OLD}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda p: {"messages": [{"role": "system", "content": p}, USER], "seed": 7}),
        (CHAT, lambda p: {"messages": [{"role": "developer", "content": [text(p)], "name": "x"}, USER]}),
        (MESSAGES, lambda p: {"system": p, "messages": [USER]}),
        (MESSAGES, lambda p: {"system": [text("x-anthropic-billing-header: cch=1;"), text(p)], "messages": [USER]}),
        (RESPONSES, lambda p: {"instructions": p, "input": OLD}),
        (RESPONSES, lambda p: {"instructions": None, "input": [{"role": "system", "content": p}, USER]}),
        (RESPONSES, lambda p: {"input": [{"role": "developer", "content": [{"type": "input_text", "text": p}]}]}),
    ],
)
def test_the_agents_prompt_is_replaced_and_nothing_else(path: str, body: Any) -> None:
    changed = with_prompt(path, json.dumps({"model": "m", **body(OLD)}).encode(), OLD, NEW)
    assert changed is not None
    assert json.loads(changed) == {"model": "m", **body(NEW)}
    assert list(json.loads(changed)) == ["model", *body(NEW)]
    for other in ("", "Play", OLD + "\n", NEW):
        assert with_prompt(path, json.dumps(body(other)).encode(), OLD, NEW) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","metadata":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"model":"m","messages":[{"role":"system","content":"Play.","name":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"system","content":[' + b"{}," * 200_000 + b"{}]}]}",
    ],
    ids=["deep", "no UTF-8", "many objects"],
)
def test_a_body_beyond_the_bounds_names_no_model(body: bytes) -> None:
    assert read_original(body) == OriginalFields()
    assert with_prompt(CHAT, body[:500], OLD, NEW) is None
