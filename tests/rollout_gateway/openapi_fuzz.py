"""schemathesis against a running gateway: what `/openapi.json` promises is what it does.

    python -m tests.rollout_gateway.openapi_fuzz --examples 10000

starts vLLM, NATS and a gateway and sends at least so many requests, valid and not, single and in sequences. Any 5xx,
status code or body that the document does not know, accepted nonsense and refused sense is a failure."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rollout_gateway.api.openapi import document
from tests.rollout_gateway.conftest import standing
from tests.rollout_gateway.frameworks import compat_bin

_SETTINGS = Path(__file__).with_name("schemathesis.toml")
_ENDLESS = "/v1/policies/events"


def fuzz(url: str, examples: int, folder: Path, *, seed: int = 0) -> tuple[int, str]:
    """How many requests were sent (more than `examples`), and what schemathesis said. Raises `AssertionError` on a
    finding."""
    operations = sum(len(path) for path in document()["paths"].values())
    each = -(-examples // operations) * 5 // 4  # operations that take nothing are soon exhausted
    command = [
        str(compat_bin() / "st"), "--config-file", str(_SETTINGS), "run", f"{url}/openapi.json",
        "--exclude-path", _ENDLESS, "--max-examples", str(each), "--seed", str(seed),
        "--continue-on-failure", "--no-color", "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, cwd=folder)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    sent = re.search(r"(\d+) generated", done.stdout)
    assert sent is not None, done.stdout
    return int(sent[1]), done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rollout_gateway.openapi_fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm-port", type=int, default=0, help="of one started by hand, as the tests' is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with standing(folder, args.vllm_port) as gateway:
            sent, said = fuzz(gateway.url, args.examples, folder, seed=args.seed)
    sys.stdout.write(said + f"\n{sent} requests sent, no finding\n")
    if sent < args.examples:
        raise SystemExit(f"only {sent} of {args.examples}")


if __name__ == "__main__":
    main()
