"""Runs the pods of a rendered overlay as a node would, without Kubernetes: every container's command with its files,
environment, user and read-only file system, and the pod's network and name.

A pod is a network namespace on a bridge that all share, with the cluster's names in `/etc/hosts`. A container that ends
is started again, and its probes are asked as the node asks them."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compose_box import BWRAP, Network, installed, machine, settings_of, terminate_inside
from tests.deploy.kit import ROOT, Object, content, pods

VENV = Path(sys.prefix).resolve()
_RESTARTS = 5


@dataclass
class Container:
    pod: str
    host: str
    """The pod's name, which is also its host name."""
    grace_s: float
    spec: Object
    volumes: dict[str, tuple[Path, bool]]
    """Path of each volume here, and whether it is a folder that the pod may write to."""
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def name(self) -> str:
        return str(self.spec["name"])


@dataclass
class Cluster:
    """All pods of an overlay."""

    objects: list[Object]
    folder: Path
    base_model: Path
    commands: dict[str, list[str]] = field(default_factory=dict)
    """Commands in place of those of containers, by the container's name."""
    containers: dict[str, Container] = field(default_factory=dict)
    operator_key: str = ""
    beside: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises `CalledProcessError` or `OSError` where the machine makes no network namespaces."""
        templates = dict(pods(self.objects))
        for job in range(1, self._machines()):
            templates[f"trainer-{job}"] = templates["trainer"]
        self.net = Network(["nats", *templates])
        hosts = {"nats": "nats"} | {name: self._host(name) for name in templates}
        names = {"gateway": "gateway", "store": "store", "nats": "nats", "vllm": "vllm-0.vllm"}
        names |= {name: f"{hosts[name]}.trainer" for name in templates if name.startswith("trainer")}
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {hosts[pod]} {names.get(pod, '')}\n" for pod, address in self.net.addresses.items())
        )
        for pod, template in templates.items():
            volumes = self._volumes(pod, template["spec"])
            grace_s = template["spec"].get("terminationGracePeriodSeconds", 30)
            for spec in template["spec"]["containers"]:
                name = pod if pod.startswith("trainer") else spec["name"]
                self.containers[name] = Container(pod, hosts[pod], grace_s, spec | {"name": name}, volumes)

    @property
    def sent(self) -> Path:
        """What the telemetry sends."""
        return self.folder / "sent"

    def _machines(self) -> int:
        """How many pods the JobSet has."""
        (job,) = next(o for o in self.objects if o["kind"] == "JobSet")["spec"]["replicatedJobs"]
        return int(job["template"]["spec"]["parallelism"])

    def _host(self, workload: str) -> str:
        """The name that Kubernetes gives to the pod of a workload: that of a StatefulSet and of a JobSet is known
        before."""
        workload, _, index = workload.partition("-")
        kind = next(o["kind"] for o in self.objects if o["metadata"]["name"] == workload and o["kind"] in _WORKLOADS)
        return {"StatefulSet": f"{workload}-0", "JobSet": f"{workload}-train-0-{index or 0}"}.get(
            kind, f"{workload}-5d4f8-x7k2p"
        )

    def _volumes(self, pod: str, spec: Object) -> dict[str, tuple[Path, bool]]:
        found = {}
        for volume in spec["volumes"]:
            path, writable = self.folder / f"{pod}-{volume['name']}", False
            if "persistentVolumeClaim" in volume:
                path = self.base_model
            elif "emptyDir" in volume:
                path.mkdir()
                writable = True
            else:
                path.mkdir()
                kind, name = ("ConfigMap", "configMap") if "configMap" in volume else ("Secret", "secret")
                named = volume[name].get("name") or volume[name]["secretName"]
                for file, text in content(self.objects, kind, named).items():
                    (path / file).write_text(text)
                    (path / file).chmod(volume[name].get("defaultMode", 0o644))
            found[volume["name"]] = (path, writable)
        claim = self.folder / f"{pod}-claim"  # of a StatefulSet's own
        claim.mkdir()
        return {"runs": (claim, True)} | found

    # -- containers ----------------------------------------------------------------------------------------------------

    def sandbox(self, container: Container) -> list[str]:
        """The command before a container's command."""
        argv = [*self.net.enter(container.pod), *BWRAP, "--unshare-uts", "--hostname", container.host]
        argv += [*machine("--ro-bind"), *settings_of(self.folder)]
        for mount in container.spec["volumeMounts"]:
            path, writable = container.volumes[mount["name"]]
            argv += ["--bind" if writable else "--ro-bind", str(path), mount["mountPath"]]
        argv += [*installed(), "--remount-ro", "/"]
        env = {"PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        for variable in container.spec.get("env", ()):
            env[variable["name"]] = self._value(container, variable)
        for source in container.spec.get("envFrom", ()):
            name = source["secretRef"]["name"]
            if any(o["kind"] == "Secret" and o["metadata"]["name"] == name for o in self.objects):
                env |= content(self.objects, "Secret", name)
        for key, value in env.items():
            argv += ["--setenv", key, value]
        return [*argv, "--chdir", "/tmp", "--"]

    def _value(self, container: Container, variable: dict[str, Any]) -> str:
        source = variable.get("valueFrom", {})
        if ref := source.get("secretKeyRef"):
            return content(self.objects, "Secret", ref["name"])[ref["key"]]
        if ref := source.get("fieldRef"):
            return {"metadata.name": container.host}[ref["fieldPath"]]
        return str(variable["value"])

    def start(self, container: Container) -> None:
        command = self.commands.get(container.name) or container.spec["command"]
        with self._log(container).open("ab") as sink:
            container.process = subprocess.Popen(
                [*self.sandbox(container), *command], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        container.starts += 1

    def _log(self, container: Container) -> Path:
        return self.folder / f"{container.name}.log"

    def log(self, name: str) -> str:
        return self._log(self.containers[name]).read_text("utf-8", "replace")

    def run_in(self, name: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """`kubectl exec`"""
        inside = self.sandbox(self.containers[name])
        return subprocess.run([*inside, *argv], capture_output=True, text=True, check=False)

    def answers(self, name: str, probe: Object) -> bool:
        """One try of a probe."""
        container = self.containers[name]
        if command := probe.get("exec", {}).get("command"):
            return self.run_in(name, command).returncode == 0
        ports = {p["name"]: p["containerPort"] for p in container.spec["ports"]}
        address = f"{self.net.addresses[container.pod]}:{ports[probe['httpGet']['port']]}"
        # The node is not in the pod, and calls it by its address.
        ask = ["curl", "-fs", "-m", "10", "-o", "/dev/null", f"http://{address}{probe['httpGet']['path']}"]
        return subprocess.run([*self.net.enter("nats"), *ask], check=False).returncode == 0

    def until(self, condition: Callable[[], bool], name: str, seconds: float = 300) -> None:
        """Wait for a condition about a container. Containers that have ended are started again meanwhile, as a node
        starts them."""
        deadline = time.monotonic() + seconds
        while not condition():
            for container in self.containers.values():
                ended = container.process is not None and container.process.poll() not in (None, 0)
                if ended and container.starts < _RESTARTS:
                    self.start(container)
                assert not ended or container.starts < _RESTARTS, (
                    f"{container.name}:\n{self.log(container.name)[-3000:]}"
                )
            assert time.monotonic() < deadline, f"{name} is not ready:\n{self.log(name)[-3000:]}"
            time.sleep(1)  # a node's probe has a period, too

    def stop(self, names: Sequence[str]) -> dict[str, int]:
        """SIGTERM to the first process of each container, as nodes send it; their exit codes."""
        processes = {name: process for name in names if (process := self.containers[name].process) is not None}
        for process in processes.values():
            terminate_inside(process)
        # No node waits longer.
        return {name: p.wait(timeout=self.containers[name].grace_s) for name, p in processes.items()}

    # -- the log -------------------------------------------------------------------------------------------------------

    def start_log(self, users: str) -> None:
        """The NATS server with the part of the chart's configuration that our values set."""
        folder = self.folder / "nats"
        folder.mkdir()
        (folder / "users.conf").write_text(users)
        (folder / "nats.conf").write_text(
            f"port: 4222\nhttp_port: 8222\ninclude ./users.conf\n"
            f"jetstream {{ store_dir: {json.dumps(str(folder))}\n sync_interval: always }}\n"
        )
        server = VENV / "bin" / "nats-server"
        argv = [str(server if server.exists() else shutil.which("nats-server")), "-c", str(folder / "nats.conf")]
        self.start_beside("nats", argv)

    def start_beside(self, pod: str, argv: Sequence[str]) -> None:
        """A program in a pod's network that is no container of ours."""
        with (self.folder / f"beside-{pod}.log").open("wb") as sink:
            self.beside.append(subprocess.Popen([*self.net.enter(pod), *argv], stdout=sink, stderr=sink))

    def close(self) -> None:
        for process in [*(c.process for c in self.containers.values()), *self.beside]:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        self.net.close()


_WORKLOADS = ("Deployment", "StatefulSet", "Job", "JobSet")
