"""Names of what is compared."""

from __future__ import annotations


class BenchmarkModelKey:
    """A model, the name that is shown for it, and the split of its trajectories."""

    def __init__(self, name: str, display_name: str | None = None, split: str | None = None) -> None:
        self.name, self.display_name, self.split = name, display_name or name, split or "val"

    def __str__(self) -> str:
        return self.display_name
