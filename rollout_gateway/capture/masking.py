"""Masks: what matches a pattern of the settings (`gateway.masks`), such as a mail address, is replaced in every event
before the gateway publishes it. All that publish texts of clients or models call `Masks.apply`.

The agent gets what was sampled; log, judge, lake and data sets get `[name of the mask]`. A call with masked text is
recorded without its tokens: they hold the text too, and without them nothing that follows in its conversation can be
computed exactly. So it is not trained. What can't be searched is refused before it is sent (a request that is no JSON,
a prompt of token ids), or recorded as `{}` (an answer that is no JSON). A text is searched as it is, and with JSON's
escapes decoded once, as in the arguments of a tool call; what is escaped more often is not found. Patterns are RE2's,
which takes time in proportion to the text, whatever the pattern is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from pipeline.config import ConfigError, MaskConfig
from pipeline.events import Event, ExchangeRecorded, ShadowAnswered
from rollout_gateway.http.errors import ApiError

E = TypeVar("E", bound=Event)
T = TypeVar("T")
_RUN_FIELDS = ("task", "text", "role", "name", "source", "rewards", "metrics", "error")
_EVALUATION_FIELDS = ("scenarios", "rollout", "prompt", "tasks", "measures")
_TEXT_FIELDS = (*_RUN_FIELDS, *_EVALUATION_FIELDS)
"""Fields of events that hold texts of clients, by themselves or in structures. Those that an event lacks are
skipped."""
_JSON_FIELDS = ("metadata", "request", "response")
"""Fields of events that hold JSON. The numbers of a response are the inference server's, such as times: a pattern of
digits would match each."""
_TOKEN_FIELDS = frozenset(("logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids"))
"""Fields of a response that hold its tokens, one by one."""
_PERSON_PATHS = (("user",), ("safety_identifier",), ("metadata", "user_id"), ("metadata", "subject"))
"""Where a call names the person whose run it is: `journeywork erase` finds a person's runs by it, so it can't be
masked. A call that names the person by what a mask matches is refused."""
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?:(?![dD][89a-fA-F])[0-9a-fA-F]{4}|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))'
)
"""A character in a text of JSON, as JSON defines it. Half of a surrogate pair is none."""
_JSON_VALUE = re.compile(r'"(?:[^"\\]|\\.)*+"|-?[0-9][0-9.eE+-]*+')
"""A text or number in valid JSON."""
_Mask = tuple[str, str]
"""Pattern and replacement, in which a backslash is written twice: RE2 reads `\\1` as a group of the match."""
_LARGE_BYTES = 32 * 1024
"""Bytes of JSON from which masking would hold up the event loop for more than a millisecond or two: it gets a
thread."""
_LARGE_JSON = 256 * 1024
"""Characters. The values of larger JSON in a text would take gigabytes one by one: the text is masked as a whole."""


class Masks:
    """The masks of a gateway. Without any, events are left as they are."""

    def __init__(self, masks: Sequence[MaskConfig] = ()) -> None:
        """Raises `ConfigError` for a pattern that RE2 does not know."""
        self._masks = [(mask.pattern, "[" + mask.name.replace("\\", r"\\") + "]") for mask in masks]
        for mask in masks:
            try:
                _replace([""], (mask.pattern, ""))
            except ValueError as error:  # pyarrow's is one
                raise ConfigError(f"gateway.masks: the pattern of {mask.name!r} can't be used: {error}") from error

    async def check_call(self, body: bytes) -> None:
        """Raise a 400 `ApiError` for a call that could not be recorded with its texts masked."""
        if self._masks:
            await in_thread_if_large(len(body), self._check_call, body)

    async def apply(self, event: E) -> E:
        """Return the event as it may be recorded. Raises a 400 `ApiError` if a mask matches the person that
        `metadata` names."""
        if not self._masks:
            return event
        return await in_thread_if_large(
            sum(len(getattr(event, name, b"")) for name in _JSON_FIELDS), self._apply, event
        )

    def _check_call(self, body: bytes) -> None:
        """Raise a 400 `ApiError` for a body that is no JSON, for a prompt of token ids, and for a person's name that a
        mask matches. May run in a thread."""
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, "invalid_json", f"The body is not valid JSON: {error}") from error
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and not all(isinstance(text, str) for text in prompt):
            message = "Token ids can't be searched for what gateway.masks names. Send the prompt as text."
            raise ApiError(400, "tokens_not_masked", message, param="prompt")
        for path in _PERSON_PATHS:
            self._check_person(fields, path)

    def _check_person(self, fields: Any, path: tuple[str, ...]) -> None:
        """Raise a 400 `ApiError` if a mask matches the person that decoded JSON names at `path`."""
        person = fields
        for name in path:
            person = person.get(name) if isinstance(person, dict) else None
        if person is not None and self._mask_in_place([person], numbers=True):
            message = (
                f"`{'.'.join(path)}` holds what gateway.masks keeps from the record: an erasure could not find the "
                "person. Name the person by a pseudonym."
            )
            raise ApiError(400, "person_masked", message, param=".".join(path))

    def _apply(self, event: E) -> E:
        """Return the event with all its texts masked; a call with masked text has no tokens. Example: if a call's
        request holds an address, the request is recorded with `[mail]`, the response without its tokens, and ids and
        logprobs are empty. May run in a thread. Raises as `apply`."""
        changed = self._masked_text_fields(event)
        rewritten: dict[str, Any] = {}
        """Fields in which a mask matched only a value that no reader of the JSON sees, so that the call keeps its
        tokens."""
        response: Any = {}
        for name in _JSON_FIELDS:
            if raw := bytes(getattr(event, name, b"")):
                written, matched, response = self._masked_json(name, raw)
                if matched:
                    changed[name] = written
                elif written != raw:
                    rewritten[name] = written
        if isinstance(event, ExchangeRecorded | ShadowAnswered) and changed:
            changed |= _without_tokens(event, response)
        changed = rewritten | changed
        return msgspec.structs.replace(event, **changed) if changed else event

    def _masked_text_fields(self, event: Event) -> dict[str, Any]:
        """Return those of `_TEXT_FIELDS` in which a mask matched, by name, masked."""
        changed: dict[str, Any] = {}
        for name in _TEXT_FIELDS:
            if value := getattr(event, name, None):
                document = [msgspec.json.decode(msgspec.json.encode(value))]  # lists in place of tuples
                if self._mask_in_place(document):
                    kind = tuple[type(value[0]), ...] if isinstance(value, tuple) else type(value)  # type: ignore[misc]
                    changed[name] = msgspec.convert(document[0], kind)
        return changed

    def _masked_json(self, name: str, raw: bytes) -> tuple[bytes, bool, Any]:
        """Mask `raw`, the JSON in the field `name`. Returns the JSON to record; whether a mask matched a value that
        readers of it see, so that tokens must go; and the decoded value. For JSON that can't be decoded: `{}`, true and
        an empty object."""
        try:
            document = [msgspec.json.decode(raw)]
            if name == "metadata":
                self._check_person({name: document[0]}, _PERSON_PATHS[-1])
            if self._mask_in_place(document, numbers=name != "response"):
                return msgspec.json.encode(document[0]), True, document[0]
            if name == "request" and self._mask_texts([text := raw.decode()]) != [text]:
                # Of a key that is there twice, the decoded request has the last value, which is the one that the
                # server reads.
                return msgspec.json.encode(document[0]), False, document[0]
            return raw, False, document[0]
        except (msgspec.DecodeError, RecursionError):
            return b"{}", True, {}

    def _mask_in_place(self, document: list[Any], *, numbers: bool = False) -> bool:
        """Mask all texts of decoded JSON in place, keys of objects included. Returns whether a mask matched one.
        `numbers`: whether numbers are searched as texts, too."""
        kinds = (str, int, float) if numbers else (str,)
        places: list[tuple[Any, Any]] = []
        """Container and key or index of each text that is a value."""
        keys: list[tuple[dict[str, Any], str]] = []
        """Object and key of each text that is a key."""
        for container in _containers(document):
            if isinstance(container, dict):
                keys += [(container, key) for key in container]
                places += [(container, key) for key, value in container.items() if isinstance(value, kinds)]
            else:
                places += [(container, at) for at, value in enumerate(container) if isinstance(value, kinds)]
        texts = [str(container[key]) for container, key in places] + [key for _, key in keys]
        masked = self._mask_texts(texts)
        # `masked` has the values first. Then come the keys, which the second loop takes.
        for (container, key), text, new in zip(places, texts, masked, strict=False):
            if new != text:
                container[key] = new
        for (container, key), new in zip(keys, masked[len(places) :], strict=True):
            if new != key:
                container[new] = container.pop(key)
        return masked != texts

    def _mask_texts(self, texts: list[str]) -> list[str]:
        """Return texts with all masks applied, in their order. JSON, such as the arguments of a tool call, stays valid
        JSON."""
        for mask in self._masks:
            texts = _apply_mask(texts, mask)
        return texts


def _apply_mask(texts: list[str], mask: _Mask) -> list[str]:
    """Apply one mask to texts. A text that is JSON, such as the arguments of a tool call, stays JSON: `{"to":"a@b.c"}`
    becomes `{"to":"[mail]"}`. If the mask matches more than single values, it becomes `{"_raw": <the masked text>}`."""
    masked = _replace_also_decoded(texts, mask)
    matching_json = {i: text for i, text in enumerate(texts) if masked[i] != text and _is_json(text)}
    by_value = _with_masked_values({i: text for i, text in matching_json.items() if len(text) <= _LARGE_JSON}, mask)
    for i in matching_json:
        candidates = (by_value.get(i, ""), masked[i], msgspec.json.encode({"_raw": masked[i]}).decode())
        masked[i] = next(filter(_is_json, candidates))
    return masked


def _with_masked_values(texts: dict[int, str], mask: _Mask) -> dict[int, str]:
    """Apply a mask to each text and number in JSON by itself, then to the whole. Where the mask matches across values,
    the result is no JSON any more. What matches nothing keeps its bytes. `texts`: JSON by its place in a list, as the
    result has it."""
    written = list({value for text in texts.values() for value in _JSON_VALUE.findall(text)})
    values = [str(msgspec.json.decode(value)) for value in written]
    new = {
        before: before if text == value else msgspec.json.encode(text).decode()
        for before, value, text in zip(written, values, _replace(values, mask), strict=True)
    }
    with_new_values = [_JSON_VALUE.sub(lambda match: new[match[0]], text) for text in texts.values()]
    return dict(zip(texts, _replace_also_decoded(with_new_values, mask), strict=True))


def _without_tokens(event: ExchangeRecorded | ShadowAnswered, response: Any) -> dict[str, Any]:
    """Return the fields of a masked call that would hold its tokens, without them: they tell the masked text too.
    `response`: the masked response, decoded; it is changed."""
    for container in _containers([response]):
        if isinstance(container, dict):
            for name in _TOKEN_FIELDS & container.keys():
                del container[name]
    named = ("prompt_ids", "sampled_ids", "logprobs", "forced", "request_hash")
    empty = {name: type(getattr(event, name))() for name in named if hasattr(event, name)}
    return {"response": msgspec.json.encode(response), **empty}


def _is_json(text: str) -> bool:
    """Whether a text is an object or a list of JSON."""
    try:
        return isinstance(msgspec.json.decode(text), dict | list)
    except (msgspec.DecodeError, RecursionError):
        return False


def _replace_also_decoded(texts: list[str], mask: _Mask) -> list[str]:
    """Apply a mask to texts with JSON's escapes decoded once, then to the texts as they are. Undecoded, a match could
    begin behind an escape: of `m\\u00fcller@example.com` it would leave `m\\u00fc`. A text that matches when decoded
    comes back decoded, so it may be no JSON any more."""
    masked = list(texts)
    plains = {i: plain for i, text in enumerate(texts) if (plain := _without_escapes(text)) != text}
    for i, new in zip(plains, _replace(list(plains.values()), mask), strict=True):
        if new != plains[i]:
            masked[i] = new
    return _replace(masked, mask)


def _replace(texts: list[str], mask: _Mask) -> list[str]:
    """Apply a mask to texts as they are. Raises a `ValueError` for a pattern that RE2 does not know."""
    if not texts:
        return []
    import pyarrow as pa  # a gateway without masks does not load it
    from pyarrow import compute

    pattern, replacement = mask
    column = pa.array(texts, pa.large_string())
    column = compute.replace_substring_regex(column, pattern=pattern, replacement=replacement)
    return [str(text) for text in column.to_pylist()]


def _without_escapes(text: str) -> str:
    """Return a text with JSON's escapes in it decoded once: `a\\u0040b` becomes `a@b`."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: _unescape(match[0]), text)


@functools.lru_cache(maxsize=65536)
def _unescape(escape: str) -> str:
    """Return the character that an escape of JSON, such as `\\u0040`, stands for."""
    return str(json.loads(f'"{escape}"'))


def _containers(document: list[Any]) -> list[Any]:
    """Return all lists and objects of decoded JSON, however deeply they are nested."""
    containers: list[Any] = [document]
    for container in containers:  # grows meanwhile
        values = container.values() if isinstance(container, dict) else container
        containers += [value for value in values if isinstance(value, list | dict)]
    return containers


async def in_thread_if_large(size: int, work: Callable[..., T], *args: Any) -> T:
    """Return what `work(*args)` returns. If it is about more than `_LARGE_BYTES` bytes (`size`), it runs in a thread,
    so that the event loop goes on."""
    return await anyio.to_thread.run_sync(work, *args) if size > _LARGE_BYTES else work(*args)
