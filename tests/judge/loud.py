"""A module of reward functions that prints when it is imported."""

from tests.judge.functions import length as length

print("at import")  # noqa: T201
