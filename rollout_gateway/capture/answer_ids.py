"""Ids of answers. The id of a captured call's answer names its trajectory, so that feedback about the answer needs no
index and no scan of the log.

The gateway chooses the id and the inference server writes it (`request_id`), so a stream costs nothing more, and a
call that is sent to a second server or answered from the log again keeps its id. `chatcmpl-<id>`, `cmpl-<id>`,
`resp_i-chatcmpl-<id>`, its items' `msg_0-chatcmpl-<id>` and Anthropic's `msg_<id>` are names of one answer."""

from __future__ import annotations

import re
import secrets

from pipeline.names import name_of_token, subject_token

_PREFIX = re.compile(r"(?:(?:resp_[in]|(?:rs|msg|fc|ctc)_\d{1,4})-)?(?:chat)?cmpl-|msg_")
_ID = re.compile(r"(.+)\.[0-9a-f]{16}")


def new_answer_id(trajectory: str) -> str:
    """Return a fresh id for an answer to a call of a trajectory."""
    return f"{subject_token(trajectory)}.{secrets.token_hex(8)}"


def without_prefix(name: str) -> str:
    """Return an answer's id without the prefixes that the APIs put before it. `name`: any of the answer's names."""
    match = _PREFIX.match(name)
    return name[match.end() :] if match is not None else name


def trajectory_of(name: str) -> str | None:
    """Return the trajectory of a captured answer, which any of the answer's names holds; `None` if it holds none."""
    match = _ID.fullmatch(without_prefix(name))
    try:
        return name_of_token(match[1]) if match is not None else None
    except ValueError:  # not what `new_answer_id` makes
        return None
