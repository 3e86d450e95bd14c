"""Programs for the PATH of a sandbox: `python` and `journeywork` of this environment, forked from a warm process
(`tests.kits.warm`) that lies outside of the sandbox.

A small program takes the place of each. It asks the test for the real one, which is forked in the small one's own
namespaces, with its descriptors, directory and environment; passes signals on to it; and ends as it does. What can't be
forked, the small program executes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

from tests.kits import warm

PLACE = "/etc/journeywork-bin"
_PROGRAM = """#!{python} -SIB
import json, os, signal, socket, sys
argv = [*{command!r}, *sys.argv[1:]]
handles = [int(name) for name in os.listdir("/proc/self/fd")]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as test:
    handles.remove(test.fileno())  # the lowest free number, which that of the listing was too
    signals = {{signal.SIGTERM, signal.SIGINT}}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    test.connect({address!r})
    order = {{"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "numbers": handles}}
    socket.send_fds(test, [json.dumps(order).encode()], handles)
    forked = test.recv(8)
    if forked:
        for number in signals:
            signal.signal(number, lambda number, _: test.send(b"%d" % number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if forked:
        os._exit(int(test.recv(8)))
os.execv(argv[0], argv)
"""
_COMMANDS = {"python": [sys.executable], "journeywork": [sys.executable, "-m", "pipeline"]}


class WarmPrograms:
    """The programs of sandboxes. `close` them after the sandboxes have ended."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made."""
        self.mount = ("--ro-bind", str(folder), PLACE)
        """What bubblewrap needs to show the programs at `PLACE`, which belongs to the PATH."""
        folder.mkdir()
        for name, command in _COMMANDS.items():
            text = _PROGRAM.format(python=sys.executable, command=command, address=f"{PLACE}/test")
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(folder / "test"))
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=_serve, args=(connection,))
                self._threads.append(thread)
                thread.start()


def _serve(caller: socket.socket) -> None:
    """Fork what a program in the sandbox asks for, and see it to its end."""
    with caller:
        data, handles, _, _ = socket.recv_fds(caller, 1 << 20, 200)
        if not data:
            return
        order = json.loads(data)
        peer, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            places = dict(zip(order.pop("numbers"), handles, strict=True))
            pid = warm.start_beside(peer, **order, descriptors=places)
        finally:
            for handle in handles:
                os.close(handle)
        if not pid:
            return
        caller.send(b"forked")
        process = os.pidfd_open(pid)
        try:
            while process not in select.select([caller, process], [], [])[0]:
                number = caller.recv(8)
                signal.pidfd_send_signal(process, int(number or signal.SIGKILL))
                if not number:
                    break
        finally:
            os.close(process)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):  # killed with its sandbox
            caller.send(b"%d" % (code if code >= 0 else 128 - code))
