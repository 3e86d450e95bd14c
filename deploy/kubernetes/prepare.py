"""Make the keys and the settings of an overlay.

    python deploy/kubernetes/prepare.py deploy/kubernetes/overlays/gpu

`prepared/` of the overlay is a run directory, readable by its owner only. `keys/` holds the keys, which stay when this
runs again: keep it. `objects.json` holds the ConfigMap and the Secrets that the overlay's kustomization adds, and
`nats-users.json` values for the chart of NATS. Further API keys: `journeywork keys add --run-dir OVERLAY/prepared`,
then this again. `trainer.processes` of the settings has to be the number of processes that the overlay's trainer starts
(components/several-trainers).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from pipeline.commands.prepare import prepare
from pipeline.config import ConfigError, load, save
from pipeline.files import write_once, write_whole
from pipeline.security import users

SECRETS = {
    "operator-keys": ("operator.nk",),
    "gateway-keys": ("gateway.nk", "vllm.key", "trajectories.secret"),
    "vllm-keys": ("sampler.nk", "vllm.key"),
    "judge-keys": ("judge.nk",),
    "trainer-keys": ("trainer.nk", "checkpoints.nk"),
    "store-keys": ("store.nk",),
    "telemetry-keys": ("telemetry.nk",),
}
"""Secrets, and the files of `keys/` in each: a pod gets its own only."""


def make(overlay: Path) -> None:
    """Write `prepared/` of `overlay`; existing keys stay. Raises `ConfigError`."""
    folder = (overlay / "prepared").absolute()
    keys = folder / "keys"
    settings = load(overlay / "journeywork.toml")
    config = prepare(
        settings.replace(
            run_dir=str(folder),
            nats=settings.nats.replace(users=str(keys)),
            vllm=settings.vllm.replace(api_key_file=str(keys / "vllm.key")),
            signing=settings.signing.replace(seed=str(keys / "checkpoints.nk")),
            gateway=settings.gateway.replace(keys_file="keys.toml"),
        )
    )
    write_once(keys / "trajectories.secret", lambda: secrets.token_urlsafe(32).encode())
    (folder / "keys.toml").touch(0o600)
    ahead = config.gateway.max_groups_ahead
    in_pods = settings.replace(  # where the files lie in the pods, with what was made here
        signing=settings.signing.replace(keys=config.signing.keys),
        gateway=settings.gateway.replace(keys=config.gateway.keys, max_groups_ahead=ahead),
    )
    save(in_pods, folder / "pods.toml")
    files = {name: {file: (keys / file).read_text("ascii") for file in files} for name, files in SECRETS.items()}
    files["api-keys"] = {"keys.toml": (folder / "keys.toml").read_text("utf-8")}
    objects = [
        _object("ConfigMap", "settings", data={"config.toml": (folder / "pods.toml").read_text("utf-8")}),
        *(_object("Secret", name, stringData=content) for name, content in files.items()),
    ]
    as_list = {"apiVersion": "v1", "kind": "List", "items": objects}
    write_whole(folder / "objects.json", json.dumps(as_list), mode=0o600)
    values = {"configMap": {"merge": {"data": {"users.conf": users.authorization(keys)}}}}
    write_whole(folder / "nats-users.json", json.dumps(values))


def _object(kind: str, name: str, **content: dict[str, str]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "journeywork"}
    metadata = {"name": name, "namespace": "journeywork", "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **content}


if __name__ == "__main__":
    os.umask(0o077)
    if len(sys.argv) != 2 or not Path(sys.argv[1], "journeywork.toml").is_file():
        sys.exit("prepare.py: name one folder with journeywork.toml, such as deploy/kubernetes/overlays/gpu")
    try:
        make(Path(sys.argv[1]))
    except ConfigError as error:
        sys.exit(f"prepare.py: {error}")
    sys.stdout.write(f"{sys.argv[1]}/prepared holds its keys and objects; kubectl apply -k takes them\n")
