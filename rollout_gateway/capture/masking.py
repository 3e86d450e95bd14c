"""Masks: what matches a pattern (`gateway.masks`) is replaced before an event is made of it.

The agent gets what was sampled; log, judge, lake and data sets get `[name of the mask]`. A call with masked text is
recorded without its tokens: they hold the text too, and without them nothing that follows in its conversation can be
computed exactly. So it is not trained. Patterns are RE2's, which takes time in proportion to the text, whatever the
pattern is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.config import ConfigError, MaskConfig
from pipeline.events import Event, ExchangeRecorded

E = TypeVar("E", bound=Event)
_TEXTS, _JSON = ("task", "text"), ("metadata", "request", "response")
_TOKENS = frozenset(("logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids"))
"""Fields of a response that hold its tokens, one by one."""


class Masks:
    """The masks of a gateway. Without any, events are left as they are."""

    def __init__(self, masks: Sequence[MaskConfig] = ()) -> None:
        """Raises `ConfigError` for a pattern that RE2 does not know."""
        self._masks = [(mask.pattern, f"[{mask.name}]") for mask in masks]
        for mask in masks:
            try:
                self._replaced([""], [(mask.pattern, "")])
            except ValueError as error:  # pyarrow's is one
                raise ConfigError(
                    f"gateway.masks: the pattern of {mask.name!r} can't be used: {error}"
                ) from error

    def __call__(self, event: E) -> E:
        """Return the event as it may be recorded."""
        if not self._masks:
            return event
        changed: dict[str, Any] = {}
        for name in _TEXTS:
            if text := getattr(event, name, ""):
                masked = self._replaced([text], self._masks)[0]
                changed |= {name: masked} if masked != text else {}
        for name in _JSON:
            if raw := bytes(getattr(event, name, b"")):
                masked_json = self._json(raw, without_tokens=False)
                changed |= {name: masked_json} if masked_json != raw else {}
        if not changed:
            return event
        if isinstance(event, ExchangeRecorded):
            response = self._json(bytes(event.response), without_tokens=True)
            changed |= {
                "response": response, "prompt_ids": b"", "sampled_ids": b"", "logprobs": b"", "forced": b"",
                "request_hash": "",
            }  # fmt: skip
        return msgspec.structs.replace(event, **changed)

    def _json(self, raw: bytes, *, without_tokens: bool) -> bytes:
        """Return JSON with its texts masked; the same bytes if none matches."""
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return raw  # an answer that broke off
        texts: list[str] = []

        def take(text: str) -> str:
            texts.append(text)
            return text

        _walk(value, take, without_tokens=False)
        masked = self._replaced(texts, self._masks)
        if masked == texts and not without_tokens:
            return raw
        new = iter(masked)
        return msgspec.json.encode(_walk(value, lambda _: next(new), without_tokens=without_tokens))

    @staticmethod
    def _replaced(texts: list[str], masks: Sequence[tuple[str, str]]) -> list[str]:
        import pyarrow as pa  # a gateway without masks does not load it
        from pyarrow import compute

        found = pa.array(texts, pa.large_string())
        for pattern, replacement in masks:
            found = compute.replace_substring_regex(found, pattern=pattern, replacement=replacement)
        return [str(text) for text in found.to_pylist()]


def _walk(value: Any, change: Any, *, without_tokens: bool) -> Any:
    """Return JSON whose texts, keys of objects included, are what `change` made of them, in the order in which they
    stand."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_walk(item, change, without_tokens=without_tokens) for item in value]
    if isinstance(value, dict):
        out = {}
        for key, item in value.items():
            new, walked = change(key), _walk(item, change, without_tokens=without_tokens)
            if not (without_tokens and key in _TOKENS):
                out[new] = walked
        return out
    return value
