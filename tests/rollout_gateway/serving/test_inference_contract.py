"""The gateway's requirements of an inference server, tested with real vLLM and with its double."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import DOUBLE, VllmServer
from tests.kits.adapters import write_adapter

ASK: Any = {"model": "tictactoe@0", "messages": [{"role": "user", "content": "a1=x b2=o"}], "max_tokens": 6}
real = pytest.param("vllm_server", id="vllm", marks=pytest.mark.vllm)
both = ["inference_double"] if DOUBLE else ["inference_double", real]


@pytest.fixture(params=both)
def server(request: pytest.FixtureRequest) -> VllmServer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, VllmServer)
    return found


def post(server: VllmServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def chat(server: VllmServer, **more: Any) -> dict[str, Any]:
    reply = post(server, "/v1/chat/completions", **{**ASK, **more})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_reply_has_its_token_ids_and_their_logprobs(server: VllmServer) -> None:
    """Of each choice, and only where they are asked for."""
    said = chat(server, n=3, temperature=1.0, return_token_ids=True, logprobs=True, top_logprobs=2)
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2]
    assert said["usage"]["prompt_tokens"] == len(said["prompt_token_ids"])
    assert said["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in said["choices"])
    for choice in said["choices"]:
        content = choice["logprobs"]["content"]
        assert len(choice["token_ids"]) == len(content) <= 6
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in content)
        assert choice["finish_reason"] in ("stop", "length")
        assert choice["message"]["role"] == "assistant"
    (bare,) = chat(server)["choices"]
    assert bare["logprobs"] is None
    assert not bare.get("token_ids")
    (long,) = chat(server, max_tokens=4, ignore_eos=True, return_token_ids=True)["choices"]
    assert (len(long["token_ids"]), long["finish_reason"]) == (4, "length")


def test_the_caller_chooses_the_id(server: VllmServer) -> None:
    """Of the answer, and of each chunk of a stream. It names the run, so that feedback finds it."""
    name = "a/b%2Ec@d:e+f=g,h~i.0123456789abcdef"
    assert chat(server, request_id=name)["id"] == f"chatcmpl-{name}"
    streamed = post(server, "/v1/chat/completions", **ASK, stream=True, request_id=name)
    ids = re.findall(r'"id": ?"(chatcmpl[^"]*)"', streamed.text)
    assert set(ids) == {f"chatcmpl-{name}"}
    completion = post(server, "/v1/completions", model="tictactoe@0", prompt="a1=x", max_tokens=2, request_id=name)
    assert completion.json()["id"] == f"cmpl-{name}"


@pytest.mark.parametrize("top", [0, 3])
def test_a_teacher_tells_the_logprobs_of_a_prompt_of_ids(server: VllmServer, top: int) -> None:
    """And of the most probable tokens, with which the sampled one may be one more. No token comes before the first."""
    ids = post(server, "/tokenize", model="tictactoe@0", prompt="a1=x b2=o c3=.").json()["tokens"]
    reply = post(server, "/v1/completions", model="tictactoe@0", prompt=ids, max_tokens=1, prompt_logprobs=top)
    first, *told = reply.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(told) == len(ids) - 1
    for token, entry in zip(ids[1:], told, strict=True):
        ranks = {e["rank"] for key, e in entry.items() if key != str(token)}
        assert {entry[str(token)]["rank"], *ranks} >= set(range(1, top + 1))
        assert len(entry) <= top + 1
        assert all(e["logprob"] < 0 for e in entry.values())
    assert post(server, "/v1/completions", model="tictactoe@0", prompt=ids, prompt_logprobs=21).status_code == 400


def test_a_prompt_has_the_ids_that_tokenizing_it_gives(server: VllmServer) -> None:
    said = chat(server, return_token_ids=True)
    tokens = post(server, "/tokenize", model="tictactoe@0", messages=ASK["messages"]).json()
    assert tokens["tokens"] == said["prompt_token_ids"]
    assert tokens["count"] == len(tokens["tokens"])
    text = post(server, "/detokenize", model="tictactoe@0", tokens=tokens["tokens"]).json()["prompt"]
    assert "a1=xb2=o" in text.replace(" ", "")


def test_the_end_of_sequence_is_a_sampled_token_and_no_text(server: VllmServer) -> None:
    for seed in range(40):
        said = chat(server, return_token_ids=True, seed=seed, max_tokens=60)
        (choice,) = said["choices"]
        if choice["finish_reason"] == "stop":
            text = post(server, "/detokenize", model="tictactoe@0", tokens=choice["token_ids"][:-1]).json()["prompt"]
            assert text == choice["message"]["content"]
            return
    pytest.fail("no reply of 40 ended by itself")


def test_other_seeds_give_other_replies(server: VllmServer) -> None:
    """Without, the attempts of a group would be one."""
    said = [chat(server, return_token_ids=True, seed=seed)["choices"][0]["token_ids"] for seed in range(8)]
    assert len({tuple(ids) for ids in said}) > 1


def test_a_stream_says_what_the_whole_reply_says(server: VllmServer) -> None:
    asked = {"seed": 5, "temperature": 1.0, "return_token_ids": True, "logprobs": True, "max_tokens": 20}
    whole = chat(server, **asked)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/chat/completions",
        timeout=60,
        json={**ASK, **asked, "stream": True, "stream_options": {"include_usage": True}},
    ) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    parts = [c for chunk in chunks for c in chunk["choices"]]
    (choice,) = whole["choices"]
    assert [i for p in parts for i in p.get("token_ids") or ()] == choice["token_ids"]
    assert "".join(p["delta"].get("content") or "" for p in parts) == choice["message"]["content"]
    assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
    assert (
        next(chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids"))
        == whole["prompt_token_ids"]
    )


def test_completions_take_token_ids(server: VllmServer) -> None:
    prompt = chat(server, return_token_ids=True)["prompt_token_ids"]
    asked = {"model": "tictactoe@0", "prompt": prompt, "max_tokens": 3, "logprobs": 2, "return_token_ids": True}
    (choice,) = post(server, "/v1/completions", **asked).json()["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 3
    assert all(len(top) >= 2 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    ("more", "status"),
    [({"model": "nobody"}, 404), ({"max_tokens": 5000}, 400), ({"messages": []}, 400), ({"messages": 3}, 400)],
)
def test_what_can_t_be_answered_is_an_openai_error(server: VllmServer, more: dict[str, Any], status: int) -> None:
    reply = post(server, "/v1/chat/completions", **{**ASK, **more})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, status)
    assert error["message"]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIStatusError),
    ):
        client.chat.completions.create(**{**ASK, **more})


def test_adapters_are_loaded_served_and_unloaded(server: VllmServer, tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_adapter(tmp_path, seed=1)

    def load() -> httpx.Response:
        return post(server, "/v1/load_lora_adapter", lora_name="contract@1", lora_path=folder)

    def listed() -> dict[str, str | None]:
        cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        return {card["id"]: card["parent"] for card in cards}

    assert load().status_code == 200
    try:
        assert listed()["contract@1"] == "tictactoe@0"
        again = load()
        assert again.status_code == 400
        assert "already" in again.text
        assert chat(server, model="contract@1")["model"] == "contract@1"
    finally:
        assert post(server, "/v1/unload_lora_adapter", lora_name="contract@1").status_code == 200
    assert "contract@1" not in listed()
    assert post(server, "/v1/unload_lora_adapter", lora_name="contract@1").status_code == 404
    assert post(server, "/v1/chat/completions", **{**ASK, "model": "contract@1"}).status_code == 404
    missing = post(server, "/v1/load_lora_adapter", lora_name="contract@2", lora_path=str(Path(folder) / "nothing"))
    assert missing.status_code in (400, 404)
