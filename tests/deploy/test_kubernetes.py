"""`deploy/kubernetes`: every overlay renders, its objects are valid, and what they name exists."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipeline import streams
from pipeline.config import Config, UiConfig, load
from tests.deploy.kit import KUBERNETES, OVERLAYS, ROOT, Object, content, named, pods, prepare, prepared, render

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = {"JobSet": "jobset.x-k8s.io_jobsets.json", "ScaledObject": "keda.sh_scaledobjects.json"}
VERSION = "1.32"


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("kubernetes") / "deploy", request.param)


@pytest.fixture(scope="module")
def objects(overlay: Path) -> list[Object]:
    return render(overlay)


@pytest.fixture
def config(objects: list[Object], tmp_path: Path) -> Config:
    """The settings of all pods."""
    (tmp_path / "config.toml").write_text(content(objects, "ConfigMap", "settings")["config.toml"])
    return load(tmp_path / "config.toml")


def closed(schema: Any) -> Any:
    """A schema that refuses fields it does not name: a server drops them, with a warning."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: closed(s) for name, s in schema.items()}
    if isinstance(out.get("properties"), dict) and "additionalProperties" not in out and "type" in out:
        out["additionalProperties"] = False
    return out


def custom_schema(kind: str) -> Any:
    schema = closed(json.loads((SCHEMAS / CUSTOM[kind]).read_text("utf-8")))
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def test_every_object_is_valid(objects: list[Object]) -> None:
    for found in objects:
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, VERSION, strict=True)
            continue
        jsonschema.validate(found, custom_schema(found["kind"]))
        for job in found["spec"].get("replicatedJobs", ()):  # the schema that is kept here ends above the Job
            as_job = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": job["template"]["spec"],
            }
            kubernetes_validate.validate(as_job, VERSION, strict=True)


def test_the_copier_of_models_is_valid() -> None:
    pod = yaml.safe_load((KUBERNETES / "model-copier.yaml").read_text("utf-8"))
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_every_file_and_claim_that_a_pod_names_exists(objects: list[Object]) -> None:
    names = {(o["kind"], o["metadata"]["name"]) for o in objects}
    claims = {
        o["metadata"]["name"]: {c["metadata"]["name"] for c in o["spec"].get("volumeClaimTemplates", ())}
        for o in objects
        if o["kind"] == "StatefulSet"
    }
    for name, pod in pods(objects):
        spec = pod["spec"]
        volumes = {v["name"] for v in spec["volumes"]} | claims.get(name, set())
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in names
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        for container in spec["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= volumes
            for variable in container.get("env", ()):
                if ref := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert ref["key"] in content(objects, "Secret", ref["name"])
            for source in container.get("envFrom", ()):
                ref = source["secretRef"]
                by_hand = f"create secret generic {ref['name']} " in (ROOT / "docs" / "install.md").read_text("utf-8")
                assert by_hand or ("Secret", ref["name"]) in names


def test_a_pod_gets_its_own_keys_only(objects: list[Object]) -> None:
    of = {
        name: {
            file
            for v in pod["spec"]["volumes"]
            if "secret" in v
            for file in content(objects, "Secret", v["secret"]["secretName"])
        }
        for name, pod in pods(objects)
    }
    assert of.pop("telemetry", {"telemetry.nk"}) == {"telemetry.nk"}
    assert of == {
        "provision": {"operator.nk"},
        "gateway": {"gateway.nk", "vllm.key", "trajectories.secret", "keys.toml"},
        "vllm": {"sampler.nk", "vllm.key"},
        "judge": {"judge.nk"},
        "trainer": {"trainer.nk", "checkpoints.nk"},
        "store": {"store.nk", "keys.toml"},
    }
    # Neither does the ConfigMap hold a key: hashes and public keys only.
    settings = content(objects, "ConfigMap", "settings")["config.toml"]
    for name in ("gateway-keys", "trainer-keys", "operator-keys", "vllm-keys"):
        assert not any(secret.strip() in settings for secret in content(objects, "Secret", name).values())


def test_every_service_selects_a_pod_and_its_port(objects: list[Object]) -> None:
    for service in (o for o in objects if o["kind"] == "Service"):
        (pod,) = [
            pod for _, pod in pods(objects) if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        ports = {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", ())}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    for found in objects:
        if found["kind"] == "PodDisruptionBudget":
            labels = found["spec"]["selector"]["matchLabels"]
            assert any(labels.items() <= pod["metadata"]["labels"].items() for _, pod in pods(objects))
    for name, pod in pods(objects):
        for container in pod["spec"]["containers"]:
            ports = {p["name"] for p in container.get("ports", ())}
            probes = [container[p] for p in ("startupProbe", "readinessProbe", "livenessProbe") if p in container]
            assert probes or name == "provision"
            assert all(p["httpGet"]["port"] in ports for p in probes if "httpGet" in p)


def test_ports_and_names_are_those_of_the_settings(objects: list[Object], config: Config) -> None:
    def port(kind: str, name: str, container: int = 0) -> int:
        spec = named(objects, kind, name)["spec"]["template"]["spec"]
        return int(spec["containers"][container]["ports"][0]["containerPort"])

    assert port("Deployment", "gateway") == config.gateway.port
    assert port("StatefulSet", "store", 1) == config.ui.port == UiConfig().port
    replicas = named(objects, "StatefulSet", "vllm")["spec"]["replicas"]
    assert list(config.vllm.urls) == [f"http://vllm-{i}.vllm:{port('StatefulSet', 'vllm')}" for i in range(replicas)]
    assert config.ui.gateway_url == f"http://gateway:{config.gateway.port}"
    assert config.nats.address == "nats://nats:4222"
    # Nobody is served without a key, and nothing without the trainer's signature.
    assert [key.role for key in config.gateway.keys] == ["operator"]
    assert len(config.signing.keys) == 1
    (job,) = named(objects, "JobSet", "trainer")["spec"]["replicatedJobs"]
    env = variables(objects, "trainer")
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == int(env["NODES"])
    assert int(env["PROCESSES"]) * int(env["NODES"]) == config.trainer.processes


def variables(objects: list[Object], pod: str) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in dict(pods(objects))[pod]["spec"]["containers"][0]["env"]}


def test_a_process_has_a_gpu_where_the_settings_want_one(objects: list[Object], config: Config) -> None:
    limits = {
        c["name"]: c["resources"]["limits"].get("nvidia.com/gpu", 0)
        for _, pod in pods(objects)
        for c in pod["spec"]["containers"]
    }
    cuda = config.vllm.device == "cuda"
    args = [*config.vllm.args, "--tensor-parallel-size", "1"]
    assert limits.pop("vllm") == (int(args[args.index("--tensor-parallel-size") + 1]) if cuda else 0)
    assert limits.pop("trainer") == (int(variables(objects, "trainer")["PROCESSES"]) if cuda else 0)
    assert set(limits.values()) == {0}


def test_pods_run_without_rights(objects: list[Object]) -> None:
    """What the namespace's label `restricted` asks for, and a read-only file system."""
    for _, pod in pods(objects):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_keda_scales_by_a_consumer_that_exists(objects: list[Object]) -> None:
    for found in (o for o in objects if o["kind"] == "ScaledObject"):
        (trigger,) = found["spec"]["triggers"]
        consumer = streams.consumer(trigger["metadata"]["consumer"])
        assert consumer.stream == trigger["metadata"]["stream"]
        target = named(objects, "Deployment", found["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in target["spec"]  # else each `kubectl apply` would set it


# -- the log -----------------------------------------------------------------------------------------------------------


def values_of(overlay: str) -> list[Object]:
    files = [KUBERNETES / "nats-values.yaml", KUBERNETES / "overlays" / overlay / "nats-values.yaml"]
    return [yaml.safe_load(f.read_text("utf-8")) for f in files if f.exists()]


def unknown(values: Object, chart: Object, at: str = "") -> Iterator[str]:
    for name, value in values.items():
        if name not in chart:
            yield f"{at}{name}"
        elif isinstance(value, dict) and chart[name]:  # an empty table takes anything
            yield from unknown(value, chart[name], f"{at}{name}.")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_chart_of_nats_knows_the_values(name: str, tmp_path: Path) -> None:
    chart = json.loads((SCHEMAS / "nats-values-2.14.2.json").read_text("utf-8"))
    values = [
        *values_of(name),
        json.loads((prepared(tmp_path / "d", name) / "prepared" / "nats-users.json").read_text()),
    ]
    assert [key for v in values for key in unknown(v, chart)] == []
    (included,) = [v for k, v in values[0]["config"]["merge"].items() if k.endswith("$include")]
    assert list(values[-1]["configMap"]["merge"]["data"]) == [included]
    # The log ends before its volume is full.
    size = next(
        v["config"]["jetstream"]["fileStore"]["pvc"]["size"]
        for v in reversed(values)
        if "fileStore" in str(v.get("config"))
    )
    config = load(KUBERNETES / "overlays" / name / "journeywork.toml")
    assert config.nats.max_bytes <= 0.9 * int(size.removesuffix("Gi")) * 2**30
    cluster: dict[str, Any] = {}
    for v in values[:-1]:
        cluster |= v["config"]["cluster"]
    assert config.nats.replicas == (cluster["replicas"] if cluster["enabled"] else 1)


def test_keys_stay_when_an_overlay_is_prepared_again(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "deploy", "small")
    made = folder / "prepared" / "objects.json"
    first = made.read_text()
    prepare(folder)
    assert made.read_text() == first
    assert {p.stat().st_mode & 0o077 for p in (made.parent, made)} == {0}
    # A further key is the gateway's when it is prepared again.
    command = [sys.executable, "-m", "pipeline", "keys", "add", "--run-dir", str(made.parent), "--name", "agents"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    prepare(folder)
    assert 'name = "agents"' in content(render(folder), "Secret", "api-keys")["keys.toml"]


# -- connections -------------------------------------------------------------------------------------------------------


def ends(selector: Object, names: set[str]) -> set[str]:
    """The pods that a selector of a policy means."""
    if not selector:
        return names
    if labels := selector.get("matchLabels"):
        return {labels["app.kubernetes.io/name"]}
    (expression,) = selector["matchExpressions"]
    return set(expression["values"])


def peers(rule: Object, side: str, names: set[str]) -> set[str]:
    out: set[str] = set()
    for peer in rule.get(side, [{"anyone": {}}]):
        if "podSelector" in peer:
            out |= ends(peer["podSelector"], names)
        elif "namespaceSelector" in peer:
            out.add(peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])
        else:
            out.add("the internet" if "ipBlock" in peer else "anyone")
    return out


def ports(rule: Object) -> list[str]:
    return sorted({str(p["port"]) for p in rule.get("ports", ())}) or ["any"]


def connections(objects: list[Object], names: set[str]) -> set[tuple[str, str, str]]:
    """(from, to, port) of all that the policies let through: what both sides allow, if both are pods here."""
    out, into = set(), set()
    for policy in (o["spec"] for o in objects if o["kind"] == "NetworkPolicy"):
        own = ends(policy["podSelector"], names)
        for rule in policy.get("egress", ()):
            out |= set(itertools.product(own, peers(rule, "to", names), ports(rule)))
        for rule in policy.get("ingress", ()):
            into |= set(itertools.product(peers(rule, "from", names), own, ports(rule)))
    anyone = {(to, port) for who, to, port in into if who == "anyone"}
    allowed = {c for c in out if c in into or c[1:] in anyone or c[1] not in names}
    return allowed | {c for c in into if c[0] not in names}


def test_the_network_lets_through_what_the_documentation_lists(objects: list[Object]) -> None:
    names = {pod["metadata"]["labels"]["app.kubernetes.io/name"] for _, pod in pods(objects)} | {"nats"}
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    table = text.split("| from | to | port | for |\n")[1].split("\n\n")[0].splitlines()[1:]
    documented = set()
    for row in table:
        who, to, port, _ = (cell.strip() for cell in row.strip("|").split("|"))
        who = who.replace("every pod", ", ".join(sorted(names)))
        documented |= {(w, t, port) for w in re.split(", ", who) for t in re.split(", ", to)}
    if "telemetry" not in names:
        documented = {c for c in documented if c[0] != "telemetry"}
    found = connections(objects, names)
    assert found == documented
    # All that a pod's settings name is among them.
    config = content(objects, "ConfigMap", "settings")["config.toml"]
    for address in re.findall(r'"((?:http|nats)://[^"]+)"', config):
        parts = urlsplit(address)
        assert any(to == str(parts.hostname).rpartition(".")[2] and port == str(parts.port) for _, to, port in found), (
            address
        )
