"""An inference server for the crash tests: vLLM's endpoints over the tests' HTTP server, without a model.

It stays up while services die, so that what it answered can be compared with what was recorded."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from tests.kits.scoring_server import ScoringServer


class Upstream(ScoringServer):
    """An inference server with vLLM's endpoints for chat, probes and adapters; a token is a letter."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        """`seed` determines the sampled tokens; token ids are smaller than `vocabulary`."""
        super().__init__()
        self._rng, self._vocabulary = random.Random(seed), vocabulary
        self.adapters: dict[str, str] = {}
        self.said: dict[str, list[int]] = {}
        """Reply id to the token ids that it sampled."""

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, Any]]:
        asked = json.loads(body) if body else {}
        match path:
            case "/health":
                return 200, {}
            case "/v1/models":
                cards = [{"id": "tiny@0", "root": "base", "parent": None}]
                cards += [{"id": k, "root": v, "parent": "tiny@0"} for k, v in self.adapters.items()]
                return 200, {"object": "list", "data": cards}
            case "/v1/load_lora_adapter":
                assert (Path(asked["lora_path"]) / "adapter_model.safetensors").is_file()
                if asked["lora_name"] in self.adapters:
                    return 400, {"error": {"message": "has already been loaded"}}
                self.adapters[asked["lora_name"]] = asked["lora_path"]
                return 200, {}
            case "/v1/unload_lora_adapter":
                return (200 if self.adapters.pop(asked["lora_name"], None) else 404), {}
            case "/v1/completions":
                likely = {str(i): -float(self._digest(asked["model"])[i]) for i in range(20)}
                probes = range(len(asked["prompt"]))
                return 200, {"choices": [{"index": i, "logprobs": {"top_logprobs": [likely]}} for i in probes]}
            case "/v1/chat/completions":
                return 200, self._chat(asked)
        return 404, {"error": {"message": f"no {path}"}}

    @staticmethod
    def _digest(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    def _chat(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["model"] == "tiny@0" or asked["model"] in self.adapters
        prompt = [2 + ord(c) % 30 for m in asked["messages"] for c in m["content"]]
        sampled = [self._rng.randrange(2, self._vocabulary) for _ in range(3)]
        name = f"chatcmpl-{asked['request_id']}"
        self.said[name] = sampled
        message = {"role": "assistant", "content": "".join(chr(60 + t - 2) for t in sampled)}
        logprobs = {"content": [{"token": "x", "logprob": -3.0, "top_logprobs": []} for _ in sampled]}
        choice = {"index": 0, "finish_reason": "stop", "token_ids": sampled, "message": message, "logprobs": logprobs}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 3, "total_tokens": len(prompt) + 3}
        head = {"id": name, "object": "chat.completion", "created": 0, "model": asked["model"]}
        return {**head, "prompt_token_ids": prompt, "choices": [choice], "usage": usage}
