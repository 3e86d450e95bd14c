"""Values of settings: reading them from the command line, and errors that name the setting and what it takes.

*Raw settings* are a tree of dicts, lists and plain values, as TOML gives it. `set_override` puts a value of the command
line (`--set section.key=value`) into such a tree, `convert` makes the typed settings of it. A setting's *dotted key* is
its place in the tree: `trainer.optimizer.learning_rate`; a number is a place in a list."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pipeline.errors import ConfigError

T = TypeVar("T")

_OVERRIDE = re.compile(r'((?>"[^"]*"|[^=])*?)=(.*)', re.DOTALL)
"""The name, in which an `=` in quotes belongs to a key, and the value."""
_KEY = re.compile(r'(?:^|\.)(?:"([^"]*)"(?=\.|$)|([^.]*))')
_LOCATED = re.compile(r"(.*) - at `(key` in `)?\$(.*)`", re.DOTALL)
"""An error of msgspec, and where: `Expected … - at `$.gateway.port``, or `key in $.vllm.env` for a name in a table."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_ALL_SETTINGS = "`journeywork docs FOLDER` writes a page of all settings"


def set_override(tree: dict[str, Any], root: type, text: str) -> None:
    """Set the value of `text` (`section.key=value`) in `tree`, the raw settings of struct `root`. Raises `ConfigError`.

    A key that holds a dot or `=` is quoted: `section."a.b"=value`. In a list, a number is a place, at most one past its
    end: `models.0.name=value`."""
    override = _OVERRIDE.fullmatch(text)
    if override is None:
        raise ConfigError(f"{text!r} is not a setting: write section.key=value")
    dotted, value = override[1].strip(), override[2].strip()
    keys = [quoted or bare for quoted, bare in _KEY.findall(dotted)]
    if not all(keys):
        raise ConfigError(f"{text!r} is not a setting: write section.key=value, with a name before the '='")
    try:
        _set(tree, root, keys, _parse(value, type_at(root, keys)))
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"{dotted!r} is not the name of a setting") from error
    except ValueError as error:
        raise ConfigError(f"{dotted}: {error}") from error


def convert(tree: Any, root: type[T], where: str = "") -> T:
    """Convert raw settings to `root`, the type of the section or setting named `where` (empty: the whole tree).

    Raises `ConfigError`, which names the setting by its dotted key and says what the setting takes."""
    for dotted, value in _leaves(tree, where):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{dotted}: expected a finite number, got {value}")
    try:
        return msgspec.convert(tree, root)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_dotted_key(str(error), root, where)) from error


def merged(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return raw settings `tree` with those of `over` in their place, table by table."""
    both = {
        key: merged(tree[key], value) if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
        for key, value in over.items()
    }
    return tree | both


def _set(tree: dict[str, Any], root: type, keys: list[str], value: Any) -> None:
    """Put a value at `keys`, below tables and lists that are made where they are missing; `root` says which of the two
    a key is. Raises `ValueError` for a place that a list does not have, and `AttributeError` or `TypeError` for a key
    below a value that is neither a table nor a list."""
    node: Any = tree
    for depth, key in enumerate(keys, 1):
        at: Any = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) > len(node):
                raise ValueError(f"{key!r} is no place in this list: write a number from 0 to {len(node)}")
            at = int(key)
            node += [{}] if at == len(node) else []
        if depth == len(keys):
            node[at] = value
        elif isinstance(node, list):
            node = node[at]
        else:
            # A table may have numbers as names, such as those of tokens in `logit_bias`.
            lists = any(typing.get_origin(kind) is tuple for kind in _choices(type_at(root, keys[:depth])))
            node = node.setdefault(at, [] if lists else {})


def _choices(kind: Any) -> list[Any]:
    """Return the types that a value may have, without annotations and `None`."""
    if typing.get_origin(kind) is typing.Annotated:
        return _choices(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [c for part in typing.get_args(kind) for c in _choices(part) if c is not types.NoneType]
    return [kind]


def type_at(root: Any, keys: list[str]) -> Any:
    """Return the declared type of the setting with these keys; `Any` if none is declared."""
    if not keys:
        return root
    for kind in _choices(root):
        inner: Any = None
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            inner = typing.get_type_hints(kind, include_extras=True).get(keys[0])
        elif typing.get_origin(kind) is dict:
            inner = typing.get_args(kind)[1]
        elif typing.get_origin(kind) is tuple and keys[0].isdigit():
            inner = typing.get_args(kind)[0]
        if inner is not None:
            return type_at(inner, keys[1:])
    return Any


def _parse(text: str, kind: Any) -> Any:
    """Read a string of the command line as a value of `kind`. Raises `ValueError` for one that sets more."""
    choices = _choices(kind)
    value: Any = text
    try:
        value, *more = tomllib.loads(f"v = {text}").values()
        if more:
            raise ValueError("more than one setting: an unquoted value has one line")
    except tomllib.TOMLDecodeError:
        if text[:1] in ("{", "["):
            try:
                value = msgspec.json.decode(text)
            except msgspec.DecodeError:
                return text
    # For a setting of type string, digits are a string too.
    if str in choices and not isinstance(value, str | list):
        return text
    return value


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting in raw settings that are at `path`."""
    if isinstance(node, dict | list | tuple):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _with_dotted_key(message: str, root: Any, where: str) -> str:
    """Return msgspec's error `message` about raw settings of type `root` with the dotted key of the setting in front,
    in TOML's words. `where`: the dotted key of `root` itself."""
    keys: list[str] = []
    if located := _LOCATED.fullmatch(message):
        message = located[1]
        # msgspec does not say which value or name of a table it refuses.
        path = located[3] + (".[...]" if located[2] else "")
        keys = [key.replace("...", "<name>") for key in re.findall(r"\w+|\.\.\.", path)]
    at = f"{where}." if where else ""
    if unknown := _UNKNOWN.fullmatch(message):
        dotted = at + ".".join([*keys, unknown[1]])
        settings = [prefix + name for prefix, table in tables(root, at) for name in table.__struct_fields__]
        meant = _suggestion(dotted, type_at(root, keys), settings)
        return f"settings: {dotted}: there is no such setting{meant} {_ALL_SETTINGS}"
    if message.startswith("Invalid enum value"):
        allowed = [a for kind in _choices(type_at(root, keys)) for a in typing.get_args(kind)]
        allowed += [kind.__name__ for kind in _choices(type_at(root, keys)) if isinstance(kind, type)]
        message = f"{message}, expected {' or '.join(map(str, allowed))}"
    for theirs, ours in (("`array`", "list"), ("`object`", "table"), ("`str`", "text")):
        message = message.replace(theirs, ours)
    dotted = (at + ".".join(keys)).rstrip(".")
    return f"settings: {dotted}: {message[:1].lower()}{message[1:]}" if dotted else f"settings: {message}"


def _suggestion(dotted: str, table: Any, settings: Sequence[str]) -> str:
    """Return the end of an error about the unknown setting `dotted` in a table of type `table`, with what may have been
    meant: a setting of this name further down, else a similar name in the table, else settings of this name elsewhere.
    `settings`: the dotted keys of all of them."""
    above, dot, name = dotted.rpartition(".")
    same = [setting for setting in settings if setting.rpartition(".")[2] == name]
    names = [f for kind in _choices(table) for f in getattr(kind, "__struct_fields__", ())]
    similar = [above + dot + near for near in difflib.get_close_matches(name, names, n=1)]
    close = [setting for setting in same if dot and setting.startswith(above + dot)] or similar
    close = close or difflib.get_close_matches(dotted, same, n=4, cutoff=0.0)
    return f"; did you mean {' or '.join(close)}?" if close else "."


def tables(kind: Any, prefix: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield each table of settings in a value of type `kind`, after the beginning of its settings' dotted keys, such as
    `trainer.lora.`. Of a list of tables it yields the first one: `models.0.`."""
    for choice in _choices(kind):
        if typing.get_origin(choice) is tuple:
            yield from tables(typing.get_args(choice)[0], f"{prefix}0.")
        elif isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            yield prefix, choice
            for name, inner in typing.get_type_hints(choice, include_extras=True).items():
                yield from tables(inner, f"{prefix}{name}.")
