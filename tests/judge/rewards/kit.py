"""Reward functions of the tests."""

from typing import Any

from judge.rewards.sandbox import RewardFunction
from pipeline.config import RewardConfig


def function(name: str, isolate: str = "require", **settings: Any) -> RewardFunction:
    """A function of the tests. Its time limit is for a machine with other work, except where a test is about the
    limit."""
    config = {
        "name": name,
        "kind": "python",
        "entry": f"tests.judge.functions:{name}",
        "isolate": isolate,
        "timeout_s": 60.0,
    }
    return RewardFunction(RewardConfig(**(config | settings)))
