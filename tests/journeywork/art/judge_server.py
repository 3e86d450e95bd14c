"""A judge model behind OpenAI's API, which scores each attempt by a hash of its text and by its place."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tests.kits.scoring_server import ScoringServer

_ATTEMPT = re.compile(r"attempt with trajectory_id (\d+) =====\n(.*?)\n===== ", re.S)


def judge(request: dict[str, Any]) -> str:
    """A reply with a score for each attempt, the last attempt first."""
    prompt = request["messages"][-1]["content"]
    scores = [
        {
            "trajectory_id": number,
            "explanation": "by its hash",
            "score": 0.9 * hashlib.sha256(text.encode()).digest()[0] / 255 + int(number) / 100,
        }
        for number, text in _ATTEMPT.findall(prompt)
    ]
    return json.dumps({"scores": scores[::-1]})


def server() -> ScoringServer:
    return ScoringServer(answer=judge)
