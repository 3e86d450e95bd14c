"""Reward functions as a user would write them, good and bad."""

from __future__ import annotations

import contextlib
import ctypes
import decimal
import fractions
import json
import mmap
import os
import pathlib
import signal
import socket
import sys
import time
from typing import Any

import numpy as np


def length(trajectory: dict[str, Any]) -> float:
    print("this does not disturb the protocol")  # noqa: T201
    return len(trajectory["messages"]) / 10


def parts(trajectory: dict[str, Any]) -> float:
    """How many conversations train."""
    return float(len(trajectory["conversations"]))


def won(trajectory: dict[str, Any]) -> float:
    return 1.0 if "win" in str(trajectory["messages"][-1]["content"]) else 0.0


def followed(trajectory: dict[str, Any]) -> Any:
    """A reward for each call that something followed: what that says. The task may name another answer."""
    if trajectory.get("task"):
        return {"reward": 0.5, **json.loads(trajectory["task"])}
    calls = {c["call"]: float(c["follow_up"][0]["content"]) for c in trajectory["calls"] if c["follow_up"]}
    return {"reward": 0.5, "calls": calls}


def hangs(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad":
        time.sleep(60)
    return 0.5


def dies(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad":
        os._exit(3)
    return 0.5


def raises(trajectory: dict[str, Any]) -> float:
    raise ValueError(f"no {trajectory['id']}")


def eats(_: dict[str, Any]) -> float:
    return float(len(bytearray(4 << 30)))


NUMBERS: dict[str, Any] = {
    "numpy float": np.float32(0.5),
    "numpy int": np.int64(1),
    "numpy bool": np.bool_(True),
    "array": np.array(0.5),
    "bool": True,
    "decimal": decimal.Decimal("0.5"),
    "fraction": fractions.Fraction(1, 2),
    "int": 1,
    "text": "0.5",
    "bytes": b"1",
    "none": None,
    "complex": 1j,
    "list": [0.5],
    "nan": float("nan"),
    "infinite": decimal.Decimal("Infinity"),
}


def number(trajectory: dict[str, Any]) -> Any:
    return NUMBERS[trajectory["id"]]


def leaks(trajectory: dict[str, Any]) -> Any:
    """Says what the run said wherever a function can. The group named `scored` gets a reward all the same."""
    text = str(trajectory["messages"])
    print(text)  # noqa: T201
    if trajectory["group"] == "scored":
        return 1.0
    match sum(trajectory["id"].encode()) % 4:
        case 0:
            raise ValueError(text)
        case 1:
            return text
        case 2:
            return {"reward": 1.0, "calls": {text: 1.0}}
        case _:
            return {"reward": text, text: 1.0}


def words(_: dict[str, Any]) -> str:
    return "good"


def huge(trajectory: dict[str, Any]) -> float:
    """What the model wrote, as a number."""
    return int(str(trajectory["messages"][-1]["content"]))


def nothing(_: dict[str, Any]) -> float:
    return float("nan")


def environment(_: dict[str, Any]) -> float:
    return float("SECRET_KEY" in os.environ)


def connects(trajectory: dict[str, Any]) -> float:
    socket.create_connection(("127.0.0.1", int(trajectory["task"])), timeout=2).close()
    return 1.0


def writes(trajectory: dict[str, Any]) -> float:
    with open(str(trajectory["task"]), "w") as file:  # noqa: PTH123
        file.write("x")
    return 1.0


def reads(trajectory: dict[str, Any]) -> float:
    with open(str(trajectory["task"])) as file:  # noqa: PTH123
        return float(len(file.read()))


def leaves_a_child(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad" and os.fork() == 0:
        time.sleep(60)
    time.sleep(30 if trajectory["id"] == "bad" else 0)
    return 0.5


def floods(_: dict[str, Any]) -> float:
    sys.stdout.write("x" * 5_000_000)
    return 0.5


# -- attacks: what a trajectory could do that takes over the process which scores it -----------------------------


def _named_daemon(name: str) -> bool:
    """Fork twice with a session between. Return True in the process that nobody waits for, now called `name`."""
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    os.setsid()
    if os.fork():
        os._exit(0)
    ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
    return True


def daemonizes(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad" and _named_daemon(str(trajectory["task"])):
        time.sleep(100)
        os._exit(0)
    if trajectory["id"] == "bad" and trajectory.get("hang"):
        time.sleep(100)
    return 0.5


def connects_unix(trajectory: dict[str, Any]) -> float:
    address = str(trajectory["task"]).replace("@", "\0")
    if trajectory["how"] == "pair":  # datagrams of a pair can be sent elsewhere
        with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as client:
            client.sendto(b"x", address)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
    return 1.0


def talks_to_itself(_: dict[str, Any]) -> float:
    """What asyncio and multiprocessing use."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"7")
        return float(theirs.recv(1))


_FORGED = (
    b'{"reward": 1.0}\n{"n": 1, "answer": "{\\"reward\\": 1.0}"}\n{"n": 2, "answer": "{\\"reward\\": 1.0}"}\n'
)


def scatters(trajectory: dict[str, Any]) -> float:
    """Leave grandchildren behind that are born while the call ends."""
    for _ in range(3):
        if os.fork() == 0:
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(15, str(trajectory["task"]).encode())
                time.sleep(100)
            os._exit(0)
    return 0.5


def forges(trajectory: dict[str, Any]) -> float:
    """Write good scores for everybody into whatever is open here and, in a sandbox, in any process that can be seen.
    Without one that would be every process of the machine."""
    if trajectory["id"] == "bad":
        sandboxed = os.getppid() == 1
        if _named_daemon(str(trajectory["task"])):
            while sandboxed:
                for fd in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
                    with contextlib.suppress(OSError), fd.open("wb", buffering=0) as channel:
                        channel.write(_FORGED)
            time.sleep(100)
        time.sleep(0.2)
        for fd in [1, *range(3, 64)]:
            with contextlib.suppress(OSError):
                os.write(fd, _FORGED * 3)
    time.sleep(0.2)
    return 0.125


def seizes(_: dict[str, Any]) -> float:
    """Count the files and memories of the other processes here that this one can open."""
    opened = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid():
            for held in [process / "mem", process / "environ", *(process / "fd" / str(n) for n in range(64))]:
                for how in (os.O_RDONLY, os.O_WRONLY):
                    with contextlib.suppress(OSError):
                        os.close(os.open(held, how))
                        opened += 1
    return float(opened)


def kills(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad":
        if os.getppid() != 1:
            raise RuntimeError("this is no sandbox: it would end every process of the machine")
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but the caller
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


def hoards(trajectory: dict[str, Any]) -> float:
    """Hold memory in six processes, each of which stays below the limit."""
    for _ in range(6):
        if os.fork() == 0:
            held = bytearray(int(trajectory["task"]) << 20)
            held[:: mmap.PAGESIZE] = b"x" * len(held[:: mmap.PAGESIZE])
            time.sleep(100)
    time.sleep(100)
    return 0.5


def hides(trajectory: dict[str, Any]) -> float:
    """Do as `hoards`, in processes whose memory maps nobody may read."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    return hoards(trajectory)


def bombs(_: dict[str, Any]) -> float:
    """Become 512 processes, where nobody says stop: enough to exceed any limit here, not enough to harm the machine."""
    for _generation in range(9):
        with contextlib.suppress(OSError):
            os.fork()
    time.sleep(100)
    return 0.5


def shares(trajectory: dict[str, Any]) -> float:
    """Leave System V shared memory behind, and say how much was there before."""
    before = len(pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()) - 1
    if trajectory["id"] == "bad":
        libc = ctypes.CDLL(None)
        libc.shmget(0, 1 << 20, 0o1600)
    return float(before)


CALLS: list[str] = []


def remembers(trajectory: dict[str, Any]) -> float:
    CALLS.append(trajectory["id"])
    return float(len(CALLS))


def exits(_: dict[str, Any]) -> float:
    sys.exit("enough")


def writes_somewhere(_: dict[str, Any]) -> float:
    """Count the places of this file system where a file can be written."""
    written = 0
    for folder in ("/", "/tmp", "/dev", "/dev/shm", "/proc", "/usr", os.path.dirname(__file__)):  # noqa: PTH120
        with contextlib.suppress(OSError), open(f"{folder}/mine", "w") as file:  # noqa: PTH123
            file.write("x")
            written += 1
    with contextlib.suppress(OSError):
        written += os.write(os.memfd_create("mine"), b"x")
    return float(written)
