"""What reaches the inference server, and what is refused by name."""

from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from rollout_gateway.dialects import permitted
from rollout_gateway.dialects.calls import Fields
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.permitted import Permitted
from rollout_gateway.http.errors import ApiError
from rollout_gateway.model_calls import _READERS as READERS
from rollout_gateway.model_calls import _TRANSLATIONS as TRANSLATIONS
from tests.rollout_gateway.access.test_access import LET_IN
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import ASK

REFUSED: dict[str, Any] = {
    "chat_template": "{{ 7 * 7 }}",
    "kv_transfer_params": {"do_remote_decode": True},
    "priority": -1000,
    "mm_processor_kwargs": {},
    "prompt_embeds": "AA==",
    "request_id": "r",
    "vllm_xargs": {},
    "cache_salt": "s",
    "use_beam_search": True,
    "prompt_logprobs": 20,
    "temprature": 1,
}
DROPPED: dict[str, Any] = {"user": "u", "store": True, "metadata": {"a": "b"}, "priority": None}


CLAUDE: Any = {"model": "tictactoe", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
OF_CLAUDE_CODE: Any = {
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": []},
    "output_config": {"effort": "high"},
    "temperature": 1,
    "stream": True,
    "service_tier": "auto",
    "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
}
"""Fields that Claude Code sends."""
CODEX: Any = {"model": "tictactoe", "input": "x"}
OF_CODEX: Any = {
    "instructions": "x",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": [],
    "prompt_cache_key": "k",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
    "service_tier": "auto",
}
"""Fields that Codex CLI sends."""


def check(rules: Permitted, **fields: Any) -> tuple[set[str], str]:
    """The names of the fields that reach the server, and the parameter of the refusal."""
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    try:
        rules.check(raw)
    except ApiError as error:
        return set(), error.param or ""
    return set(raw), ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_may_do_harm_is_refused_by_name(name: str) -> None:
    assert check(Permitted(), **ASK, **{name: REFUSED[name]}) == (set(), name)
    assert check(Permitted([name]), **ASK, **{name: REFUSED[name]}) == ({*ASK, name}, "")


def test_what_asks_nothing_of_the_server_is_dropped() -> None:
    assert check(Permitted(), **ASK, **DROPPED, top_k=3) == ({*ASK, "top_k"}, "")


@pytest.mark.parametrize("name", ["chat_template", "tokenize"])
def test_a_templates_arguments_replace_nothing(name: str) -> None:
    assert check(Permitted(), **ASK, chat_template_kwargs={"enable_thinking": False})[1] == ""
    refused = check(Permitted(), **ASK, chat_template_kwargs={name: "{{ x }}"})[1]
    assert refused == f"chat_template_kwargs.{name}"
    assert check(Permitted(), **ASK, chat_template_kwargs={"a": [1] * 9})[1] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("url", "permitted"),
    [
        ("data:image/png;base64,AAAA", True),
        ("https://images.example.com/a.png", True),
        ("HTTP://IMAGES.example.com:8080?x=1", True),
        ("http://169.254.169.254/latest/meta-data", False),
        ("file:///etc/passwd", False),
        ("https://images.example.com@evil.example/a.png", False),
        ("https://images.example.com\\@evil.example/a.png", False),
        ("https://evil.example/images.example.com", False),
        ("https://images.example.com.evil.example", False),
    ],
)
def test_media_come_from_the_hosts_of_the_setting(url: str, permitted: bool) -> None:
    rules = Permitted(media_domains=["images.example.com"])
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"video_url": url},
    ):
        refused = check(rules, messages=[{"role": "user", "content": [{"type": "text", "text": url}, part]}])[1]
        assert (refused == "") is permitted, part
        assert permitted or refused == "messages[0].content"
        # Without the setting, nothing is fetched.
        nowhere = check(Permitted(), messages=[{"role": "user", "content": [part]}])[1]
        assert (nowhere == "") is url.startswith("data:")
    # A key may be written with escapes.
    escaped = b'[{"role":"user","content":[{"\\u0069mage\\u005furl":%b}]}]' % msgspec.json.encode(url)
    fields = {"messages": msgspec.Raw(escaped)}
    if permitted:
        rules.check(fields)
    else:
        with pytest.raises(ApiError, match="allowed_media_domains"):
            rules.check(fields)


def test_tensors_and_names_in_the_servers_cache_of_media_are_refused() -> None:
    """All keys share the cache: under a `uuid` a call could read another key's image, or put its own in its place."""
    whole = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    tensors = ({"type": "image_embeds", "image_embeds": "AA=="}, {"type": "prompt_embeds", "data": "AA=="})
    for part in (*tensors, {"type": "image_url", "image_url": None, "uuid": "x"}, {**whole, "uuid": "x"}):
        assert check(Permitted(), messages=[{"role": "user", "content": [part]}])[1] == "messages[0].content"
    assert check(Permitted(), messages=[{"role": "user", "content": [whole]}])[1] == ""


def test_every_way_to_the_server_is_checked(start_front: StartGateway) -> None:
    gateway = start_front(further_fields=("priority",))
    image: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
    chat: Any = {"model": "tictactoe", "messages": [{"role": "user", "content": [image]}]}
    source = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
    claude: Any = {"model": "tictactoe", "max_tokens": 1, "messages": [{"role": "user", "content": [source]}]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}
    for path, body, status in (
        ("/v1/chat/completions", {**ASK, "chat_template": "x"}, 400),
        ("/v1/chat/completions", {**ASK, "priority": 1}, LET_IN),
        ("/v1/chat/completions", chat, 400),
        ("/v1/completions", {"model": "tictactoe", "prompt": "x", "kv_transfer_params": {}}, 400),
        ("/v1/messages", claude, 400),
        ("/v1/messages/count_tokens", claude, 400),
        ("/v1/responses", {"model": "tictactoe", "input": [item]}, 400),
        ("/v1/messages", {**CLAUDE, "temprature": 1}, 400),
        ("/v1/messages/count_tokens", {**CLAUDE, "temprature": 1}, 400),
        ("/v1/messages", {**CLAUDE, "prompt_logprobs": 1}, 400),
        ("/v1/messages", {**CLAUDE, "prompt": "y"}, 400),
        ("/v1/messages", {**CLAUDE, "n": 2}, 400),
        ("/v1/messages", {**CLAUDE, **OF_CLAUDE_CODE, "priority": 1, "temprature": None}, LET_IN),
        ("/v1/responses", {**CODEX, "temprature": 1}, 400),
        ("/v1/responses", {**CODEX, "messages": ASK["messages"]}, 400),
        ("/v1/responses", {**CODEX, "top_logprobs": 2}, 400),
        ("/v1/responses", {**CODEX, **OF_CODEX, "priority": 1, "min_p": 0.1}, LET_IN),
        ("/tokenize", {**ASK, "chat_template": "x"}, 400),
        ("/tokenize", chat, 400),
    ):
        reply = httpx.post(gateway.url + path, json=body, timeout=60)
        assert reply.status_code == status, (path, reply.text)
    packed = httpx.post(gateway.url + path, content=b"x", headers={"content-encoding": "gzip"}, timeout=60)
    assert (packed.status_code, packed.json()["error"]["code"]) == (415, "unsupported_encoding")


MANY: Any = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1025)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**ASK, "n": 129}, "n"),
        ("/v1/chat/completions", {**ASK, "n": 0}, "n"),
        ("/v1/chat/completions", {**ASK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {**ASK, "stop": ["x"] * 129}, "stop"),
        ("/v1/chat/completions", {**ASK, "tools": MANY}, "tools"),
        ("/v1/chat/completions", {**ASK, "messages": ASK["messages"] * 16385}, "messages"),
        ("/v1/completions", {"model": "tictactoe", "prompt": "x", "n": 129}, "n"),
        ("/v1/completions", {"model": "tictactoe", "prompt": ["x"] * 9, "n": 128}, "prompt"),
        ("/v1/completions", {"model": "tictactoe", "prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"model": "tictactoe", "prompt": "x", "best_of": 2}, "best_of"),
        ("/v1/completions", {"model": "tictactoe", "prompt": "x", "stop": ["x"] * 129}, "stop"),
        ("/v1/messages", {**CLAUDE, "stop_sequences": ["x"] * 129}, "stop_sequences"),
        ("/v1/messages", {**CLAUDE, "tools": [{"name": "f"}] * 1025}, "tools"),
        ("/v1/messages", {**CLAUDE, "messages": CLAUDE["messages"] * 16385}, "messages"),
        ("/v1/responses", {**CODEX, "tools": [{"type": "function", "name": "f"}] * 1025}, "tools"),
        ("/v1/responses", {**CODEX, "input": [{"role": "user", "content": "x"}] * 16385}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_multiplies_a_calls_work_is_bounded(path: str, body: Any, param: str) -> None:
    def fields(data: bytes) -> Fields:
        translated = path in TRANSLATIONS
        return (TRANSLATIONS[path](data).call() if translated else READERS[path](data)).fields

    with pytest.raises(ApiError) as refused:
        Permitted().check(fields(msgspec.json.encode(body)))
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex", "defer_loading": True},
    ],
    ids=lambda tool: tool["name"],
)
def test_a_tool_without_a_schema_that_only_claude_knows_is_refused_by_name(tool: dict[str, Any]) -> None:
    """As a function without arguments, the model would call it, and nobody would run it."""
    own = {"type": "custom", "name": "move", "input_schema": {"type": "object"}}
    with pytest.raises(ApiError) as refused:
        MessagesTranslation(msgspec.json.encode({**CLAUDE, "tools": [own, tool]}))
    assert (refused.value.status, refused.value.code) == (400, "unsupported_tool")
    assert tool["name"] in refused.value.message
    assert tool["type"] in refused.value.message
    with_schema = {"type": tool["type"], "name": "look", "input_schema": {"type": "object"}}
    shown = [own, {**own, "type": None, "name": "stay"}, with_schema, {"name": "bare"}]
    call = MessagesTranslation(msgspec.json.encode({**CLAUDE, "tools": shown})).call()
    names = [t["function"]["name"] for t in msgspec.json.decode(call.fields["tools"])]
    assert names == ["move", "stay", "look", "bare"]


def test_each_field_of_the_official_clients_is_known() -> None:
    refused = {
        "/v1/messages": {"container", "mcp_servers", "fallbacks", "compaction", "thread", "betas"},
        "/v1/responses": {"conversation", "prompt", "top_logprobs"},
    }
    for path, parameters in (
        ("/v1/messages", anthropic.types.message_create_params.MessageCreateParamsBase),
        ("/v1/messages", anthropic.types.beta.message_create_params.MessageCreateParamsBase),
        ("/v1/responses", openai.types.responses.response_create_params.ResponseCreateParamsBase),
    ):
        translation = TRANSLATIONS[path]
        known = {field.name for field in msgspec.structs.fields(translation.kind)}
        assert set(parameters.__annotations__) - known - translation.dropped - permitted.DROPPED <= refused[path]
