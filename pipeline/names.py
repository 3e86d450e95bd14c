"""Identifiers, and their form in NATS subjects.

A NATS subject token must not contain `.`, `*`, `>`, white space or control characters. Model names such as
`Qwen/Qwen3-0.6B` do contain some. `subject_token` escapes them, `name_of_token` reverses it.
"""

from __future__ import annotations

import calendar
import functools
import hashlib
import re
import secrets
import time
from urllib.parse import quote

MAX_NAME = 200
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
"""A step as `version_name` writes it. 18 digits fit into 64 bits."""
_OUTSIDE = "outside:"
_DATE = "%Y%m%dT%H%M%SZ"
"""How an id carries its time."""
_DATED = re.compile(r"[a-z]{1,8}-([0-9]{8}T[0-9]{6}Z)-[0-9a-f]{20}")
_IN_ADDRESS = ":+=,~"
"""Characters that are not escaped in the address of a version, beside letters, digits and `_.-`."""
_UNSAFE = re.compile(rb"[^A-Za-z0-9_\-/@:+=,~]")


class InvalidNameError(ValueError):
    """A name that cannot be used as an identifier. The message holds its beginning."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name!r} cannot be a name: {why}")


def is_name(name: str) -> bool:
    """Return whether `check_name` accepts a name."""
    try:
        check_name(name)
    except InvalidNameError:
        return False
    return True


def check_name(name: str) -> str:
    """Return `name` if it is a valid identifier. Raises `InvalidNameError` with the reason otherwise."""
    if not name:
        raise InvalidNameError(name, "it is empty")
    if len(name) > MAX_NAME:
        raise InvalidNameError(name[:40] + "…", f"it is longer than {MAX_NAME} characters")
    if not name.isprintable():
        raise InvalidNameError(name, "it holds characters that are not printable")
    if name in (".", ".."):
        raise InvalidNameError(name, "in a URL it means another path")
    return name


@functools.lru_cache(maxsize=16384)
def subject_token(name: str) -> str:
    """Return `name` as one NATS subject token, escaped like a URL: `a.b` becomes `a%2Eb`."""
    check_name(name)
    return _UNSAFE.sub(lambda m: b"%%%02X" % m.group()[0], name.encode()).decode()


def name_of_token(token: str) -> str:
    """Return the name of a subject token: the inverse of `subject_token`."""
    return re.sub(r"(?:%[0-9A-F]{2})+", lambda m: bytes.fromhex(m.group().replace("%", "")).decode(), token)


def version_name(model: str, step: int) -> str:
    """Return the name under which vLLM serves policy version `step` of `model`. Step 0 is the base model."""
    return f"{model}@{step}"


def version_address(branch: str, version: str) -> str:
    """Return how `models.0.start` and `train --adopt` name a version after the lake and `#`: `main/m@3`. A slash in a
    name is escaped: `main/org%2Fm@3`."""
    model, _, step = version.rpartition("@")
    return f"{quote(branch, safe=_IN_ADDRESS)}/{quote(model, safe=_IN_ADDRESS)}@{step}"


def branch_model(model: str, branch: str) -> str:
    """Return the name under which the gateway serves what was trained on another branch than `main`: the versions of
    `support` on branch `stricter` are `support+stricter@1` and so on."""
    return f"{model}+{branch}"


def parse_version(version: str) -> tuple[str, int]:
    """Return model and step of a policy version: `("m", 7)` of `"m@7"`.

    A version has one spelling, the one of `version_name`. Raises `InvalidNameError` for anything else: `m@07`, a step
    in other than ASCII digits, or one of more than 18 digits."""
    if not is_version(version):
        why = "a policy version has the form <model>@<step>, and the step is a number without leading zeros"
        raise InvalidNameError(version[:MAX_NAME], why)
    model, _, step = version.rpartition("@")
    return model, int(step)


def is_version(name: str) -> bool:
    """Return whether `parse_version` accepts `name`."""
    model, _, step = name.rpartition("@")
    return bool(model and _STEP.fullmatch(step))


def is_base_version(version: str) -> bool:
    """Return whether `version`, which `parse_version` accepts, is step 0: the untrained base model."""
    return version.endswith("@0")


def outside_version(name: str) -> str:
    """Return what stands for the policy version where the outside model `name` answered."""
    return _OUTSIDE + name


def is_outside(version: str) -> bool:
    """Return whether `version` stands for an outside model (`outside_version`), and is no version of a policy."""
    return version.startswith(_OUTSIDE)


def outside_model(version: str) -> str:
    """Return the name of the outside model of a version for which `is_outside` is true."""
    return version.removeprefix(_OUTSIDE)


def split_point(trajectory: str) -> float:
    """Return the place of a trajectory in a split of traffic between two versions, from 0 to 100, by a hash of its id.
    Below the split's `percent` it gets the first version, else the other one."""
    return int.from_bytes(hashlib.sha256(trajectory.encode()).digest()[:8], "big") / 2**64 * 100


def new_dated_id(prefix: str) -> str:
    """Return a random identifier that carries the present time, such as `t-20261122T093012Z-5f1c…`. Ids of one prefix
    sort by their time."""
    return f"{prefix}-{time.strftime(_DATE, time.gmtime())}-{secrets.token_hex(10)}"


def time_of_id(name: str) -> float:
    """Return the time that an id of `new_dated_id` carries, in Unix seconds; 0 for any other name."""
    match = _DATED.fullmatch(name)
    try:
        return calendar.timegm(time.strptime(match[1], _DATE)) if match else 0.0
    except ValueError:
        return 0.0


def new_id(prefix: str) -> str:
    """Return a random identifier of 80 bits, such as `t-5f1c…`."""
    return f"{prefix}-{secrets.token_hex(10)}"
