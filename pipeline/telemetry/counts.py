"""What this process did with the log, as plain integers: counting costs an addition. `metrics` makes metrics of
them."""

from __future__ import annotations

from collections import Counter

published: Counter[str] = Counter()
"""Events that the log acknowledged, by wire name."""
taken: Counter[str] = Counter()
"""Events that a consumer of this process was given, by consumer."""
done: Counter[str] = Counter()
"""Events that it acknowledged, by consumer."""
pending: dict[str, int] = {}
"""Messages that waited behind the newest one, by consumer."""
