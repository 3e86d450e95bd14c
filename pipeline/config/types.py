"""The types of settings: a section, and numbers within limits, by what they stand for (`Count`: 1 or more).

`msgspec` checks the limits when it converts the settings; `journeywork docs` shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from pipeline.config.overrides import convert, type_at

Port = Annotated[int, Meta(ge=0, le=65535)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=2)]
SmallCount = Annotated[int, Meta(ge=1, le=100_000)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Percent = Annotated[float, Meta(ge=0, le=100)]
Coefficient = Annotated[float, Meta(ge=0, le=1000)]
Scale = Annotated[float, Meta(gt=0, le=10_000)]
Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]
Correlation = Annotated[float, Meta(ge=-1, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Payload = Annotated[int, Meta(ge=1024, le=64 * 1024 * 1024)]
Copies = Annotated[int, Meta(ge=1, le=5)]
Prompt = Annotated[int, Meta(ge=1000)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the settings file."""

    def replace(self, **values: Any) -> Self:
        """Return the section with other values, each checked as one of the settings file is. Raises `ConfigError`, and
        `TypeError` for a name that is no setting."""
        section = type(self)
        checked = {
            name: convert(msgspec.to_builtins(value), type_at(section, [name]), f"{section.__name__}.{name}")
            for name, value in values.items()
        }
        return msgspec.structs.replace(self, **checked)
