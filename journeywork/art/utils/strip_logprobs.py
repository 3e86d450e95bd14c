"""Logged objects without logprobs, which are most of their size."""

from __future__ import annotations

from typing import Any

import pydantic


def strip_logprobs(obj: Any) -> Any:
    """Return a copy of an object without its logprobs, at every depth: keys are left out, fields are `None`."""
    if isinstance(obj, dict):
        return {key: strip_logprobs(value) for key, value in obj.items() if key != "logprobs"}
    if isinstance(obj, list | tuple):
        return type(obj)(strip_logprobs(value) for value in obj)
    if isinstance(obj, pydantic.BaseModel):
        fields = {name: None if name == "logprobs" else strip_logprobs(value) for name, value in obj}
        return obj.model_copy(update=fields)
    return obj
