"""A fast double of vLLM's OpenAI server for tests that need an inference server and no real model.

It has the base model's tokenizer and chat template, so prompts have the token ids that vLLM would give. Sampled
tokens and their logprobs come from a hash of seed, model and prompt: equal requests with a seed get equal answers,
another adapter answers otherwise. `tests/rollout_gateway/serving/test_inference_contract.py` runs one contract over
this double and over real vLLM.

    python -m tests.kits.inference_double --port 8000 --model examples/tictactoe/model --served-model-name tictactoe@0
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CONTEXT = 256
"""Tokens of prompt and reply together, as the tests' vLLM is started with."""
MAX_LOGPROBS = 20
"""vLLM's default of `--max-logprobs`."""
_END_EVERY = 12
"""On average, one token in 12 ends the reply."""


@dataclass
class Token:
    id: int
    text: str
    logprob: float
    others: dict[int, float]
    """Further candidates with their logprobs, the likeliest first."""


class RefusalError(Exception):
    """An error answer instead of a completion."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str)


def _are_tokens(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(token) is int and token >= 0 for token in found)


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as vLLM gives it to the chat template: arguments of calls are objects."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = [{**c["function"], "arguments": json.loads(c["function"]["arguments"])} for c in calls]
    return {**message, "tool_calls": [{**c, "function": f} for c, f in zip(calls, functions, strict=True)]}


class Double:
    def __init__(
        self, model: Path, name: str, words: Sequence[str] = (), end_every: int = _END_EVERY, context: int = CONTEXT
    ) -> None:
        """`words` are the texts, each of them one token, that replies are made of; by default all printable tokens.
        On average, one token in `end_every` ends the reply."""
        from transformers import AutoTokenizer  # after `main` has decided whether it may import torch

        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
        self.name, self._end_every, self.context = name, end_every, context
        self.adapters: dict[str, str] = {}
        special = set(self.tokenizer.all_special_ids)
        texts = {i: self.tokenizer.decode([i]) for i in range(len(self.tokenizer)) if i not in special}
        # A token that is part of a character has no text of its own.
        self._plain = [
            i for i, text in texts.items() if (text in words if words else text.isascii() and text.isprintable())
        ]
        if words and len(self._plain) != len(set(words)):
            raise ValueError(f"not every one of {words} is one token of {model}")

    def adapter_of(self, body: dict[str, Any]) -> str | None:
        """Return the name of the folder that the adapter of this call was loaded from; `None` for the base model."""
        path = self.adapters.get(body.get("model", self.name))
        return None if path is None else Path(path).name

    def prompt_of(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            messages = body["messages"]
            if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
                raise RefusalError(400, "messages: a list with at least one message", param="messages")
            said, begun = [_with_parsed_arguments(m) for m in messages], body.get("add_generation_prompt", True)
            options = {"add_generation_prompt": begun, "tokenize": True, "return_dict": False}
            ids: list[int] = self.tokenizer.apply_chat_template(said, tools=body.get("tools"), **options)
            return ids
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            encoded: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False)
            return encoded
        batch = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
        if not all(map(_are_tokens, batch)) or any(i >= len(self.tokenizer) for ids in batch for i in ids):
            raise RefusalError(400, "prompt: a text or a list of token ids of this model", param="prompt")
        return list(prompt)

    def check(self, body: dict[str, Any], prompt: list[int]) -> int:
        """Return how many tokens the reply may have. Raises `RefusalError`."""
        if body.get("model", self.name) not in (self.name, *self.adapters):
            message = f"The model `{body['model']}` does not exist."
            raise RefusalError(404, message, "NotFoundError", "model")
        room = self.context - len(prompt)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        if asked < 1 or room < 1 or asked > room:
            raise RefusalError(
                400,
                f"This model's maximum context length (max_model_len) is {self.context} tokens: {len(prompt)} in the "
                f"prompt, {asked} asked for.",
            )
        return int(asked)

    def sample(self, body: dict[str, Any], prompt: list[int], room: int, choice: int) -> Iterator[Token]:
        """Yield tokens to the reply's end. The last one is the end of sequence unless `room` ends the reply."""
        seed = body.get("seed")
        salt = secrets.token_hex(4) if seed is None else f"{seed}"
        for at in range(room):
            key = f"{salt}|{body.get('model')}|{choice}|{at}|{prompt}"
            digest = hashlib.sha256(key.encode()).digest()
            ends = digest[0] % self._end_every == 0 and not body.get("ignore_eos")
            chosen = (
                self.tokenizer.eos_token_id
                if ends
                else self._plain[int.from_bytes(digest[1:5], "big") % len(self._plain)]
            )
            probability = (1 + digest[5]) / 320
            rest = math.log((1 - probability) / 20)
            others = {i: rest - n / 100 for n, i in enumerate(self._plain[:20]) if i != chosen}
            yield Token(chosen, self.tokenizer.decode([chosen]), math.log(probability), others)
            if ends:
                return

    def logprobs_after(self, model: str, prompt: list[int]) -> list[float]:
        """Return the logprob of each token of the vocabulary after a prompt."""
        digest = hashlib.sha256(f"{model}|{prompt}".encode()).digest()
        logits = np.random.default_rng(list(digest)).normal(0.0, 2.0, len(self.tokenizer))
        logprobs: list[float] = (logits - np.log(np.exp(logits).sum())).tolist()
        return logprobs

    def prompt_logprobs(self, body: dict[str, Any], prompt: list[int]) -> list[dict[str, Any] | None] | None:
        """Return of each token of the prompt its logprob, with the most probable ones, as vLLM does. The first has
        none. `None` if the call does not ask. Raises `RefusalError`."""
        if (top := body.get("prompt_logprobs")) is None:
            return None
        if top > MAX_LOGPROBS:
            raise RefusalError(400, f"Requested prompt logprobs of {top}, which is greater than {MAX_LOGPROBS}")
        told: list[dict[str, Any] | None] = [None]
        for at in range(1, len(prompt)):
            logprobs = self.logprobs_after(body.get("model", self.name), prompt[:at])
            ranked = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])
            ids = [prompt[at], *(i for i in ranked[:top] if i != prompt[at])]
            told.append({str(i): {"logprob": logprobs[i], "rank": ranked.index(i) + 1} for i in ids})
        return told

    def shown(self, token: Token, top: int) -> dict[str, Any]:
        """Return a token's entry in `logprobs.content`."""

        def entry(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        ranked = sorted([(token.id, token.logprob), *token.others.items()], key=lambda pair: -pair[1])[:top]
        tops = [entry(self.tokenizer.decode([i]), logprob) for i, logprob in ranked]
        return {**entry(token.text, token.logprob), "top_logprobs": tops}

    def likeliest(self, token: Token, count: int) -> dict[str, float]:
        """Return texts and logprobs of the likeliest other candidates."""
        ranked = sorted(token.others.items(), key=lambda pair: -pair[1])[:count]
        return {self.tokenizer.decode([i]): logprob for i, logprob in ranked}


def _finish(tokens: list[Token], end: int) -> tuple[str, str]:
    """Return text and finish reason of a complete reply."""
    ended = bool(tokens) and tokens[-1].id == end
    return "".join(t.text for t in tokens[: -1 if ended else None]), "stop" if ended else "length"


_TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)


def _message(text: str, tools: Any) -> dict[str, Any]:
    """Return the message of a reply. If tools were offered, calls in the form of Hermes and Qwen are parsed; a reply
    with a malformed one stays text, as with vLLM."""
    calls = []
    try:
        functions = [json.loads(found) for found in _TOOL_CALL.findall(text)] if tools else []
    except ValueError:
        functions = []
    for function in functions:
        told = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
        calls.append({"id": f"call-{secrets.token_hex(4)}", "type": "function", "function": told})
    content = text.partition("<tool_call>")[0] or None if calls else text
    return {"role": "assistant", "content": content, "tool_calls": calls}


def build(double: Double) -> Starlette:
    names = (f"{secrets.token_hex(4)}{n}" for n in itertools.count())
    end = double.tokenizer.eos_token_id

    async def read(request: Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            raise RefusalError(400, f"invalid JSON: {error}") from error
        if not isinstance(body, dict):
            raise RefusalError(400, "the body is no object")
        return dict(body)

    def head(body: dict[str, Any], kind: str) -> dict[str, Any]:
        prefix = "cmpl-" if kind == "text_completion" else "chatcmpl-"
        return {
            "id": prefix + (body.get("request_id") or next(names)),
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model", double.name),
            "system_fingerprint": double.adapter_of(body),
        }

    def usage(prompt: list[int], sampled: int) -> dict[str, Any]:
        return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}

    async def chat(request: Request) -> Response:
        body = await read(request)
        prompt = double.prompt_of(body)
        room, ids_too = double.check(body, prompt), bool(body.get("return_token_ids"))
        top, logprobs = int(body.get("top_logprobs") or 0), bool(body.get("logprobs"))
        if body.get("stream"):
            return StreamingResponse(stream_chat(body, prompt, room), media_type="text/event-stream")
        choices, sampled = [], 0
        for number in range(int(body.get("n") or 1)):
            tokens = list(double.sample(body, prompt, room, number))
            sampled += len(tokens)
            text, reason = _finish(tokens, end)
            message = _message(text, body.get("tools"))
            if message["tool_calls"] and reason == "stop":
                reason = "tool_calls"
            shown = {"content": [double.shown(t, top) for t in tokens]} if logprobs else None
            choice = {"index": number, "message": message, "logprobs": shown, "finish_reason": reason}
            ids = {"token_ids": [t.id for t in tokens]} if ids_too else {}
            choices.append({**choice, "stop_reason": None, **ids})
        told = {"usage": usage(prompt, sampled), **({"prompt_token_ids": prompt} if ids_too else {})}
        return JSONResponse({**head(body, "chat.completion"), "choices": choices, **told})

    async def stream_chat(body: dict[str, Any], prompt: list[int], room: int) -> AsyncIterator[str]:
        shared, ids_too = head(body, "chat.completion.chunk"), bool(body.get("return_token_ids"))
        options, sampled = body.get("stream_options") or {}, 0
        top = int(body.get("top_logprobs") or 0)

        def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({**shared, 'choices': choices, **more})}\n\n"

        numbers = range(int(body.get("n") or 1))
        first = {"prompt_token_ids": prompt} if ids_too else {}
        for number in numbers:
            delta = {"role": "assistant", "content": ""}
            yield chunk([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}], **first)
        for number in numbers:
            for count, token in enumerate(double.sample(body, prompt, room, number), 1):
                sampled += 1
                ended = token.id == end
                reason = "stop" if ended else "length" if count == room else None
                shown = {"content": [double.shown(token, top)]} if body.get("logprobs") else None
                delta = {"content": "" if ended else token.text}
                entry = {"index": number, "delta": delta, "logprobs": shown, "finish_reason": reason}
                yield chunk([entry | ({"token_ids": [token.id]} if ids_too else {})])
        if options.get("include_usage"):
            yield chunk([], usage=usage(prompt, sampled))
        yield "data: [DONE]\n\n"

    async def completions(request: Request) -> Response:
        body = await read(request)
        texts, ids_too = body.get("prompt"), bool(body.get("return_token_ids"))
        several = isinstance(texts, list) and texts and isinstance(texts[0], str | list)
        prompts = [double.prompt_of({**body, "prompt": text}) for text in (texts if several else [texts])]
        choices: list[dict[str, Any]] = []
        sampled = 0
        for prompt, number in itertools.product(prompts, range(int(body.get("n") or 1))):
            tokens = list(double.sample(body, prompt, double.check(body, prompt), number))
            sampled += len(tokens)
            text, reason = _finish(tokens, end)
            entry: dict[str, Any] = {"index": len(choices), "text": text, "finish_reason": reason, "stop_reason": None}
            entry["logprobs"] = None
            if (asked := body.get("logprobs")) is not None:
                top_logprobs = [double.likeliest(token, asked) | {token.text: token.logprob} for token in tokens]
                entry["logprobs"] = {
                    "tokens": [t.text for t in tokens],
                    "token_logprobs": [t.logprob for t in tokens],
                    "text_offset": [],
                    "top_logprobs": top_logprobs,
                }
            entry["prompt_logprobs"] = double.prompt_logprobs(body, prompt)
            told = {"token_ids": [t.id for t in tokens], "prompt_token_ids": prompt} if ids_too else {}
            choices.append(entry | told)
        used = usage([i for ids in prompts for i in ids], sampled)
        return JSONResponse({**head(body, "text_completion"), "choices": choices, "usage": used})

    async def models(_: Request) -> Response:
        served = [(double.name, double.name, None), *((n, root, double.name) for n, root in double.adapters.items())]
        cards = [{"id": name, "object": "model", "root": root, "parent": parent} for name, root, parent in served]
        return JSONResponse({"object": "list", "data": cards})

    async def load(request: Request) -> Response:
        body = await read(request)
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in double.adapters:
            raise RefusalError(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not (path / "adapter_model.safetensors").is_file():
            raise RefusalError(404, f"No adapter found for {path}", "NotFoundError")
        double.adapters[name] = str(path)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        name = (await read(request))["lora_name"]
        if double.adapters.pop(name, None) is None:
            raise RefusalError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(request: Request) -> Response:
        body = await read(request)
        if "messages" not in body and not isinstance(body.get("prompt"), str):
            raise RefusalError(400, "prompt: a text", param="prompt")
        tokens = double.prompt_of(body)
        return JSONResponse({"count": len(tokens), "max_model_len": double.context, "tokens": tokens})

    async def detokenize(request: Request) -> Response:
        tokens = (await read(request)).get("tokens")
        if not _are_tokens(tokens):
            raise RefusalError(400, "tokens: a list of token ids", param="tokens")
        return JSONResponse({"prompt": double.tokenizer.decode(tokens)})

    async def health(_: Request) -> Response:
        return Response()

    started = time.time()

    async def metrics(_: Request) -> Response:
        return Response(f"process_start_time_seconds {started:.3f}\n")

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RefusalError)
        return JSONResponse(error.body, error.status)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/load_lora_adapter", load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ],
        exception_handlers={RefusalError: refused},
    )


def main() -> None:
    # A tokenizer needs no torch, whose import is five of the seven seconds that a start would take.
    sys.modules["torch"] = None  # type: ignore[assignment]
    parser = argparse.ArgumentParser(prog="python -m tests.kits.inference_double")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--words", nargs="*", default=[], help="texts of one token each that replies are made of")
    parser.add_argument("--end-every", type=int, default=_END_EVERY)
    parser.add_argument("--max-model-len", type=int, default=CONTEXT)
    given = parser.parse_args()
    double = Double(given.model, given.served_model_name, given.words, given.end_every, given.max_model_len)
    app = build(double)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning", timeout_keep_alive=60)


if __name__ == "__main__":
    main()
