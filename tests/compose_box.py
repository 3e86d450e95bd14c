"""Starts the services of a compose file as compose would, without Docker: every command with its files, environment,
user, names and network.

bubblewrap gives each service the file system (the image's program under /opt/venv is this environment's), a user that
is not root, processes of its own, a network namespace on a bridge that all share, and the `/etc/hosts` of that
network."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parent.parent
UID = 10001
BWRAP = (
    "bwrap",
    *("--unshare-user", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"),
    *("--unshare-pid", "--unshare-ipc", "--die-with-parent", "--new-session", "--clearenv"),
)
"""A container's user, without rights, and its processes."""
BIN = Path(sys.executable).parent
_VENV = Path(sys.prefix).resolve()
_COMPILED = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
_NOT_SHOWN = ("proc", "dev", "etc", "runs", "models", "run", "tmp")
"""Folders of this machine that no sandbox gets as they are. In /run and in /tmp other tests mount network namespaces
and disks, and bubblewrap fails if a mount in a folder that it shows ends at that moment."""


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


def machine(how: str) -> list[str]:
    """Arguments of bubblewrap that show this machine's files, by `--bind` or `--ro-bind`."""
    argv = []
    for entry in sorted(Path("/").iterdir()):
        if entry.name not in _NOT_SHOWN:
            argv += ["--symlink", str(entry.readlink())] if entry.is_symlink() else [how, str(entry)]
            argv.append(str(entry))
    return [*argv, "--proc", "/proc", "--dev", "/dev"]


def settings_of(folder: Path) -> list[str]:
    """/etc of this machine with the `hosts` of a folder."""
    argv = []
    for entry in sorted(Path("/etc").iterdir()):
        if entry.name != "hosts":
            argv += ["--symlink", str(entry.readlink())] if entry.is_symlink() else ["--ro-bind-try", str(entry)]
            argv.append(str(entry))
    return [*argv, "--ro-bind", str(folder / "hosts"), "/etc/hosts"]


def installed() -> list[str]:
    """This checkout, which is what is installed in the image, its environment, and what torch compiles for vLLM, as all
    vLLMs of this machine share it. All of it may lie in /tmp."""
    _COMPILED.mkdir(exist_ok=True)
    argv = ["--ro-bind", *2 * [str(ROOT)], "--ro-bind", *2 * [str(_VENV)], "--bind", *2 * [str(_COMPILED)]]
    return [*argv, "--setenv", "TORCHINDUCTOR_CACHE_DIR", str(_COMPILED)]


def terminate_inside(sandbox: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the first process in a sandbox."""
    for inner in psutil.Process(sandbox.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            parent = inner.parent()
            if inner.name() != "bwrap" and parent is not None and parent.name() == "bwrap":
                inner.terminate()


class Network:
    """A bridge, and a namespace for each service."""

    def __init__(self, names: list[str]) -> None:
        self._id = f"jw{os.getpid() % 100000}"
        # Two bridges of one subnet take each other's packets: every process has its own.
        net = f"10.{192 + os.getpid() // 250 % 60}.{os.getpid() % 250}"
        self.addresses = {name: f"{net}.{n}" for n, name in enumerate(names, 2)}
        self._spaces: list[str] = []
        try:
            run("ip", "link", "add", self._id, "type", "bridge")
            run("ip", "addr", "add", f"{net}.1/24", "dev", self._id)
            run("ip", "link", "set", self._id, "up")
            for n, (name, address) in enumerate(self.addresses.items()):
                space, outer = self.space(name), f"{self._id}v{n}"
                run("ip", "netns", "add", space)
                self._spaces.append(space)
                run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
                run("ip", "link", "set", outer, "master", self._id, "up")
                run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                run("ip", "-n", space, "link", "set", "eth0", "up")
                run("ip", "-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def space(self, name: str) -> str:
        return f"{self._id}-{name}"

    def enter(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.space(name)]

    def close(self) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._id], capture_output=True, check=False)


@dataclass
class Box:
    """The services of one compose file, and where their volumes lie on this machine."""

    services: dict[str, dict[str, Any]]
    net: Network
    folder: Path
    """For logs, `/etc/hosts` and homes."""
    mounts: dict[str, tuple[Path, bool]]
    """Path in the container to the file or folder here, and whether it can be written."""
    host_env: dict[str, str]
    """The environment in which `docker compose` is called."""
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, compose: Path, folder: Path, mounts: dict[str, tuple[Path, bool]], host_env: dict[str, str]) -> Box:
        services = yaml.safe_load(compose.read_text("utf-8"))["services"]
        net = Network(list(services))
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in net.addresses.items())
        (folder / "hosts").write_text(hosts)
        return cls(services, net, folder, mounts, host_env)

    def order(self) -> list[str]:
        """The services, each after those that it depends on."""
        found: list[str] = []
        while len(found) < len(self.services):
            ready = [
                n for n, s in self.services.items() if n not in found and set(s.get("depends_on", {})) <= set(found)
            ]
            assert ready, "a circle of depends_on"
            found += ready
        return found

    def sandbox(self, name: str) -> list[str]:
        """The command before a container's command: its network, files, user and environment."""
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        argv = [*self.net.enter(name), *BWRAP, *machine("--bind"), "--tmpfs", "/dev/shm", "--tmpfs", "/tmp"]
        argv += [*settings_of(self.folder), *installed(), "--bind", str(home), str(home)]
        for place in (volume.split(":")[1 if "}" not in volume else -2] for volume in self.services[name]["volumes"]):
            source, writable = self.mounts[place]
            argv += ["--bind" if writable else "--ro-bind", str(source), place]
        # The image's environment, and what the file says; nothing of the host's besides.
        env = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home)}
        env["PYTHONPATH"] = str(ROOT)  # in the image this checkout is what is installed
        for variable in self.services[name].get("environment", []):
            if variable in self.host_env:
                env[variable] = self.host_env[variable]
        for key, value in env.items():
            argv += ["--setenv", key, value]
        return [*argv, "--chdir", str(home), "--"]

    def command(self, name: str) -> list[str]:
        service = self.services[name]
        return [*service.get("entrypoint", ["journeywork"]), *service.get("command", [])]

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def start(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as sink:
            process = subprocess.Popen(
                [*self.sandbox(name), *self.command(name)], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        self.running[name] = process
        return process

    def run_in(self, name: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """A command in the network of a service, with its files: `docker compose exec`."""
        return subprocess.run([*self.sandbox(name), *argv], capture_output=True, text=True, check=False)

    def healthy(self, name: str) -> bool:
        """One try of the service's health check."""
        return self.run_in(name, self.services[name]["healthcheck"]["test"][1:]).returncode == 0

    def stop(self, name: str) -> int:
        """SIGTERM to the container's command, as `docker stop` sends it (`init: true` passes it on); its exit code."""
        process = self.running[name]
        grace = float(str(self.services[name]["stop_grace_period"]).removesuffix("s"))
        terminate_inside(process)
        return process.wait(timeout=grace)

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self.net.close()
