"""Settings of tests, by dotted names."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pipeline.config import Section

S = TypeVar("S", bound=Section)


def with_values(section: S, values: Mapping[str, Any]) -> S:
    """Return `section` with other values, by dotted name: `{"optimizer.learning_rate": 1e-3}`. Raises `ConfigError`."""
    for dotted, value in values.items():
        name, _, rest = dotted.partition(".")
        section = section.replace(**{name: with_values(getattr(section, name), {rest: value}) if rest else value})
    return section
