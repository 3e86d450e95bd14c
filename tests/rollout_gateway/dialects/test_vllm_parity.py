"""What vLLM's own `/v1/responses` and `/v1/messages` render with a public chat template, the gateway's chat completion
renders too: vLLM's own code converts and renders both."""

import json
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.chat.conversations import build_conversations
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.translate import Translation
from rollout_gateway.http.errors import ApiError
from tests.conftest import VllmServer
from tests.rollout_gateway.dialects.kit import recorded
from tests.rollout_gateway.dialects.shapes import CLAUDE_CODE, CODEX, HELLO, SYSTEM, text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Of vLLM's imports."""

TEMPLATES = [
    "qwen2_5",
    "qwen3",
    "qwen3_instruct_2507",
    "qwen3_6",
    "qwen3_8",
    "qwen3_5_think",
    "gemma",
    "gemma3",
    "gemma4_v5",
    "llama3_1",
    "cohere",
    "cohere2",
    "glm4moe",
    "deepseekv3",
    "phi3_5",
    "gptoss",
    "nemotron_3_nano",
    "lfm2_v2",
]
"""System first or an error, no system, roles that alternate or an error, a developer of its own, none of these."""


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(VllmServer.base))


@cache
def template(name: str) -> str:
    import importlib.resources

    return (importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


MODEL: Any = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)


def rendered(name: str, messages: list[Any], tools: list[dict[str, Any]] | None) -> str | None:
    """The prompt as vLLM renders it; `None` if the template refuses."""
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

    form = _detect_content_format(template(name), default="string")
    try:
        conversation, _, _ = parse_chat_messages(messages, MODEL, form)
        return str(
            safe_apply_chat_template(
                MODEL,
                _tokenizer(),
                conversation,
                tools=tools,
                chat_template=template(name),
                tokenize=False,
                add_generation_prompt=True,
            )
        )
    except VLLMValidationError:
        return None


def rendered_chat(name: str, chat: Any) -> str | None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate(chat) if isinstance(chat, dict) else chat
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return rendered(name, list(request.messages), tools)


def vllm_messages(name: str, body: dict[str, Any]) -> str | None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Serving

    merge = Serving._detect_merge_inline_system(template(name))
    request = AnthropicMessagesRequest.model_validate(deepcopy(body))
    return rendered_chat(name, Serving.to_chat_completion_request(request, merge_inline_system=merge))


def vllm_responses(name: str, body: dict[str, Any]) -> str | None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    request = ResponsesRequest.model_validate(deepcopy(body))
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    return rendered(name, messages, construct_tool_dicts(request.tools, request.tool_choice))


def gateway(name: str, kind: type[Translation], body: dict[str, Any]) -> str | None:
    """As the gateway asks: once more if the server refuses and the translation knows another form."""
    try:
        translation = kind(json.dumps(body).encode())
        translation.call()
    except ApiError:
        return None
    prompt = rendered_chat(name, json.loads(translation.call().body))
    if prompt is None and translation.merge_system():
        prompt = rendered_chat(name, json.loads(translation.call().body))
    return prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_vllm_answers_the_gateway_answers(name: str) -> None:
    vllm, ours = set(), set()
    for shape, body in CLAUDE_CODE.items():
        asked = {"model": "m", "max_tokens": 5, **body}
        if vllm_messages(name, asked) is not None:
            vllm.add(f"messages: {shape}")
        if gateway(name, MessagesTranslation, asked) is not None:
            ours.add(f"messages: {shape}")
    for shape, body in CODEX.items():
        asked = {"model": "m", **body}
        if vllm_responses(name, asked) is not None:
            vllm.add(f"responses: {shape}")
        if gateway(name, ResponsesTranslation, asked) is not None:
            ours.add(f"responses: {shape}")
    assert vllm
    assert vllm <= ours


def test_the_prompts_are_alike() -> None:
    """Where a template takes a shape at all: Gemma's takes no system."""
    first = {"model": "m", **CODEX["first turn"]}
    for name in ("qwen3_6", "qwen3", "cohere2"):
        assert gateway(name, ResponsesTranslation, first) == vllm_responses(name, first) is not None
    assert vllm_messages("gemma", {"model": "m", "max_tokens": 5, **CLAUDE_CODE["first turn"]}) is None
    assert vllm_messages("gemma", {"model": "m", "max_tokens": 5, **CLAUDE_CODE["only the attribution"]})


@pytest.mark.parametrize("place", ["system", "messages"])
def test_the_attribution_line_does_not_split_a_session(place: str) -> None:
    """It has another hash in each call of Claude Code."""

    def asked(cch: str, *history: Any) -> dict[str, Any]:
        line = text(f"x-anthropic-billing-header: cc_version=2.1; cch={cch};")
        if place == "system":
            body = {"system": [line, SYSTEM], "messages": [HELLO, *history]}
        else:
            body = {"messages": [{"role": "system", "content": [line, SYSTEM]}, HELLO, *history]}
        return dict(MessagesTranslation(json.dumps({"model": "m", "max_tokens": 5, **body}).encode()).chat())

    answer = {"role": "assistant", "content": "Hi"}
    calls = [recorded(asked("1f3a9"), answer), recorded(asked("07be2", answer, HELLO), answer)]
    (conversation,), _ = build_conversations([msgspec.structs.replace(c, seq=n) for n, c in enumerate(calls)])
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.messages[0]["content"] == "You are Claude Code."
