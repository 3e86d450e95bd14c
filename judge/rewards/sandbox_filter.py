"""The filter for system calls of a sandboxed reward function: it can make no socket, connect none, and make no System V
shared memory, which would outlive its call.

A network namespace alone does not keep a function from a Unix socket whose path it can see, such as one in a folder of
`judge.rewards.readable`. A pair of connected sockets (`socketpair`, which asyncio uses) stays possible if it is a
stream, which can be sent nowhere else. The filter is a classic BPF program for bubblewrap's `--seccomp`.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _SOCKET_TYPE_AT = 0, 4, 24
"""Offsets in `struct seccomp_data`: the call's number, its architecture, and the low half of its second argument."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_X32 = 0x40000000
"""Numbers from here on are calls of another ABI, which the filter would not recognise."""
_TYPE_MASK, _STREAM, _SEQPACKET = 0xF, 1, 5
_IO_URING_SETUP = 425
_NUMBERS = {"x86_64": (0xC000003E, 41, 42, 53, 29), "aarch64": (0xC00000B7, 198, 203, 199, 194)}
"""By machine: the audit code of its architecture, and the numbers of `socket`, `connect`, `socketpair` and
`shmget`."""


def program(machine: str = "") -> bytes:
    """Return the filter for a kind of machine, the present one by default; empty for one that is not known."""
    if (known := _NUMBERS.get(machine or platform.machine())) is None:
        return b""
    architecture, socket, connect, socketpair, shmget = known
    # Each instruction: operation, jumps if true and if false (in instructions to skip), operand.
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 0, 11, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_AT_LEAST, 9, 0, _X32),
        (_IF_EQUAL, 8, 0, socket),
        (_IF_EQUAL, 7, 0, connect),
        (_IF_EQUAL, 6, 0, _IO_URING_SETUP),
        (_IF_EQUAL, 5, 0, shmget),
        (_IF_EQUAL, 0, 5, socketpair),
        (_LOAD, 0, 0, _SOCKET_TYPE_AT),
        (_AND, 0, 0, _TYPE_MASK),
        (_IF_EQUAL, 2, 0, _STREAM),
        (_IF_EQUAL, 1, 0, _SEQPACKET),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def open_program() -> int | None:
    """Return a file descriptor of the filter, which the caller closes; `None` if the machine is not known."""
    if not (code := program()):
        return None
    fd = os.memfd_create("seccomp")
    os.write(fd, code)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
