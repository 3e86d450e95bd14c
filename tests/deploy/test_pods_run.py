"""Every command of the overlay `small`, with a trainer on two machines and with telemetry, starts as a pod would start
it, its probes answer, and together they serve a call and send its trace."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from judge.rewards.sandbox import sandbox_fault
from tests.conftest import DOUBLE
from tests.deploy.kit import ROOT, Object, prepared, render
from tests.deploy.pod_box import Cluster

pytestmark = [
    pytest.mark.inference,
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm of pods"),
    pytest.mark.timeout(590),
    pytest.mark.skipif(bool(sandbox_fault()), reason=sandbox_fault()),
]

_DOUBLE = """
import uvicorn
from pathlib import Path
from tests.kits.inference_double import Double, build
uvicorn.run(build(Double(Path("/models/base"), "support@0", [], 12, 256)), host="0.0.0.0", port=8000)
"""

_TRACE_BACKEND = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with open(sys.argv[1], "ab") as file:
            file.write(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", 4318), Handler).serve_forever()
"""


def settings_for_this_machine(text: str) -> str:
    """The overlay's settings with those of the demo's model, and of its inference double, whose logprobs are no
    model's."""
    own = "max_model_len = 2048"
    assert text.count(own) == 1
    text = text.replace(own, "max_model_len = 256")
    return text + "groups_per_step = 1\nprocesses = 2\n" + ("logprob_bound = 1000\n" if DOUBLE else "")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    parts = "components: [../../components/several-trainers, ../../components/telemetry]\n"
    overlay = prepared(tmp_path / "deploy", "small", settings_for_this_machine, parts)
    # The secret that docs/install.md makes by hand.
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    backend = {"kind": "Secret", "metadata": {"name": "telemetry-backend"}, "stringData": endpoint}
    objects = [*render(overlay), backend]
    models = tmp_path / "models"
    shutil.copytree(ROOT / "examples" / "tictactoe" / "model", models / "base")
    (tmp_path / "node").mkdir()
    try:
        made = Cluster(objects, tmp_path / "node", models, {"vllm": ["python", "-c", _DOUBLE]} if DOUBLE else {})
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    values = json.loads((overlay / "prepared" / "nats-users.json").read_text())
    made.operator_key = (overlay / "prepared" / "keys" / "operator.key").read_text().strip()
    try:
        made.start_log(values["configMap"]["merge"]["data"]["users.conf"])
        made.start_beside("telemetry", ["python", "-c", _TRACE_BACKEND, str(made.sent)])
        yield made
    finally:
        made.close()


def call(cluster: Cluster, key: str, path: str, body: Object) -> tuple[int, Any]:
    """A request of a program in another pod to the service `gateway`."""
    ask = ["curl", "-s", "-w", "\n%{http_code}", "-H", f"Authorization: Bearer {key}"]
    ask += ["-H", "Content-Type: application/json", "-d", json.dumps(body), f"http://gateway:8700{path}"]
    text, _, status = cluster.run_in("store", ask).stdout.rpartition("\n")
    return int(status), json.loads(text) if text.startswith("{") else text


def test_every_container_starts_its_probes_answer_and_a_call_is_served(cluster: Cluster) -> None:
    for container in cluster.containers.values():  # in no order, as Kubernetes does
        cluster.start(container)
    for name, container in cluster.containers.items():
        if name == "provision":
            cluster.until(lambda: cluster.containers["provision"].process.poll() == 0, name)  # type: ignore[union-attr]
            continue
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in container.spec:
                cluster.until(lambda n=name, p=container.spec[kind]: cluster.answers(n, p), name)  # type: ignore[misc]
    trainers = "trainer", "trainer-1"
    cluster.until(lambda: any('"ready"' in cluster.log(name) for name in trainers), "trainer")
    # The trainer has no startup probe; this is what the liveness probe of the machine with rank 0 looks at.
    assert sorted(cluster.run_in(t, ["test", "-s", "/tmp/alive"]).returncode for t in trainers) == [0, 1]

    message = {"model": "support", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert call(cluster, "none", "/v1/chat/completions", message)[0] == 401
    status, run = call(cluster, cluster.operator_key, "/v1/trajectories", {"model": "support"})
    assert status in (200, 201), run
    status, reply = call(cluster, run["api_key"], "/v1/chat/completions", message)
    assert (status, reply["model"][:9]) == (200, "support@0"), reply

    # The runbook's command finds the call in the history that the store has written.
    query = ["journeywork", "sql", "--config", "/etc/journeywork/config.toml", "--format", "json"]
    query.append("SELECT count(*) AS calls FROM exchanges")
    cluster.until(lambda: '"calls":1' in cluster.run_in("store", query).stdout, "store")
    cluster.until(lambda: cluster.sent.exists() and b"support" in cluster.sent.read_bytes(), "telemetry")

    # A pod has its user, no capability, no file that it may write but its volumes', and no other pod's keys.
    told = cluster.run_in(
        "judge", ["sh", "-c", "id -u; ls /etc/journeywork-keys; grep CapEff /proc/self/status"]
    ).stdout
    assert told.split() == ["10001", "judge.nk", "CapEff:", "0" * 16]
    assert cluster.run_in("judge", ["sh", "-c", "echo > /usr/x"]).returncode != 0

    # Stopped, everything ends within its pod's time, and as it should: 0, but the trainer's Job must not be complete.
    for name, code in cluster.stop([n for n in cluster.containers if n != "provision"]).items():
        good = code != 0 if name.startswith("trainer") else code in (0, 143) if name == "vllm" else code == 0
        assert good, (name, code, cluster.log(name)[-2000:])
