"""Reward functions as a user would write them, good and bad."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any


def length(trajectory: dict[str, Any]) -> float:
    print("this does not disturb the protocol")  # noqa: T201
    return len(trajectory["messages"]) / 10


def won(trajectory: dict[str, Any]) -> float:
    return 1.0 if "win" in str(trajectory["messages"][-1]["content"]) else 0.0


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


def words(_: dict[str, Any]) -> str:
    return "good"


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
