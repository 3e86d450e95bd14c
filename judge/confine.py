"""What the kernel lets a process give up for good without any privilege: network, writing, reading what it need not read.

Standard library alone, because `judge.sandbox_worker` runs it before anything else. Two means, each where the kernel has it:
an empty network namespace of one's own (user namespaces), and Landlock (read only what is named, write nothing that was not
open already, no TCP, no signals to others).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38
# The same numbers on every architecture, as all system calls since 2019.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION = 1
_RULE_PATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FILE_ONLY = _EXECUTE | _READ_FILE
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/dev/null", "/dev/zero",
    "/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo", "/proc/self", "/sys/devices/system/cpu",
)  # fmt: skip


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def no_network() -> str:
    """Leave for a network namespace with nothing in it, not even a loopback that is up; what went wrong, or nothing."""
    if _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        return ""
    return f"network namespace: {os.strerror(ctypes.get_errno())}"


def _rights(version: int) -> tuple[int, int, int]:
    """All file rights, network rights and scopes that this version of Landlock knows."""
    files = (1 << 13) - 1
    for since, right in ((2, 13), (3, 14), (5, 15)):
        if version >= since:
            files |= 1 << right
    return files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0


def read_only(paths: list[str]) -> str:
    """From now on: read and execute below `paths` only, write nowhere, no TCP; what went wrong, or nothing."""
    libc = _libc()
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    if version < 1:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    files, network, scopes = _rights(version)
    attributes = struct.pack("<QQQ", files, network, scopes)[
        : 24 if version >= 6 else 16 if version >= 4 else 8
    ]
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # what is not there needs no permission
        allowed = _EXECUTE | _READ_FILE | _READ_DIR if Path(path).is_dir() else _FILE_ONLY
        rule = struct.pack("<Qi", allowed, opened)
        failed = libc.syscall(_LANDLOCK_ADD, rules, ctypes.c_int(_RULE_PATH), rule, ctypes.c_uint32(0))
        os.close(opened)
        if failed:
            return f"Landlock: {path}: {os.strerror(ctypes.get_errno())}"
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = libc.syscall(_LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0))
    os.close(rules)
    return f"Landlock: {os.strerror(ctypes.get_errno())}" if failed else ""


def confine() -> list[str]:
    """Give up all of it; what the kernel did not permit."""
    readable = [p for p in (*sys.path, sys.prefix, sys.base_prefix, *_SYSTEM) if p]
    return [m for m in (no_network(), read_only(readable)) if m]
