"""The tasks: how many words a sentence shall have, which word it shall use and which letter it shall avoid."""

from __future__ import annotations

import random

WORDS = (
    "apple", "baker", "bird", "blue", "boat", "bread", "bring", "brown", "build", "calm", "candle",
    "chair", "child", "cloud", "cold", "cook", "dance", "day", "dog", "door", "draw", "dream", "eat",
    "fish", "flower", "fly", "fox", "friend", "garden", "girl", "give", "glad", "green", "grow", "happy",
    "hat", "hill", "home", "horse", "house", "jump", "king", "lake", "lamp", "light", "lion", "little",
    "moon", "music", "night", "open", "paint", "quiet", "rain", "red", "river", "run", "sail", "sheep",
    "sing", "sky", "sleep", "small", "snow", "song", "star", "sun", "swim", "tree", "walk", "warm",
    "water", "white", "wind", "write", "young",
)  # fmt: skip
LENGTHS = (3, 4, 5, 6)
LETTERS = ("a", "e", "i", "o", "r")


def task(seed: str) -> str:
    """Return the task of this seed as the model reads it. It can be solved."""
    rng = random.Random(f"sentences/{seed}")
    letter = rng.choice(LETTERS)
    word = rng.choice([word for word in WORDS if letter not in word])
    return f"Write {rng.choice(LENGTHS)} words. Use: {word}. Avoid the letter: {letter}. No word twice."
