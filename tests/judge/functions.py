"""Reward functions as a user would write them, good and bad."""

import contextlib
import ctypes
import decimal
import fractions
import json
import os
import resource
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


def huge(trajectory: dict[str, Any]) -> float:
    """What the model wrote, as a number."""
    return int(str(trajectory["messages"][-1]["content"]))


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


def forks(trajectory: dict[str, Any]) -> float:
    """Leave a process behind that nobody waits for, called as the task says; a daemon has a session of its own."""
    if trajectory["id"] == "bad":
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            if trajectory["daemon"]:
                os.setsid()
            if os.fork():
                os._exit(0)
            ctypes.CDLL(None).prctl(15, str(trajectory["task"]).encode())  # PR_SET_NAME
            time.sleep(100)
            os._exit(0)
        time.sleep(100 if trajectory.get("hang") else 0)
    return 0.5


def connects_unix(trajectory: dict[str, Any]) -> float:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(trajectory["task"]).replace("@", "\0"))
    return 1.0


def limit(_: dict[str, Any]) -> float:
    return float(resource.getrlimit(resource.RLIMIT_NPROC)[0])


def kills(trajectory: dict[str, Any]) -> float:
    if trajectory["id"] == "bad":
        if os.getppid() != 1:
            raise RuntimeError("this is no sandbox: it would end every process of the machine")
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but the caller
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5


CALLS: list[str] = []


def remembers(trajectory: dict[str, Any]) -> float:
    CALLS.append(trajectory["id"])
    return float(len(CALLS))


def exits(_: dict[str, Any]) -> float:
    sys.stdout.write("x" * 5_000_000)
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
