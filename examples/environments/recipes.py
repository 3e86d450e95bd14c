"""What prime-rl trains on each environment, and what it reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """prime-rl's settings for an environment (its `examples/basic/<name>/rl.toml`, November 2026). The steps are those
    that the figure it reached took."""

    base: str
    """The model that it begins with."""
    steps: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    """Most tokens of a reply."""
    max_model_len: int
    learning_rate: float
    """For a LoRA adapter. Where prime-rl trains all weights, ten times its rate (LoRA Without Regret, 2025); wordle's
    recipe names no rate, and this one is a guess."""
    rank: int
    reached: str
    """The figure to beat."""
    agent: str = "agent"
    """The environment's name for the role that is trained."""
    taskset: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment's tasks."""


RECIPES = {
    "reverse-text": Recipe(
        "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT", 20, 8, 16, 128, 2048, 3e-5, 16, "reward 0.05 to 0.8 in 20 steps"
    ),
    "alphabet-sort": Recipe(
        "Qwen/Qwen3-4B-Instruct-2507",
        100,
        16,
        16,
        768,
        4096,
        1e-5,
        32,
        "reward 0.26 to 0.81 in 100 steps on one H100",
        taskset={"min_turns": 3, "max_turns": 5, "task": {"power_per_turn": False}},
    ),
    "wordle": Recipe(
        "PrimeIntellect/Qwen3-1.7B-Wordle-SFT", 100, 32, 16, 1024, 8192, 1e-5, 16, "60 % of the games won", "player"
    ),
}
