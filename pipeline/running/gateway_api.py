"""The gateway's HTTP API, for commands: which gateway is meant, with which key, and one request.

`journeywork policy`, `decide`, `what-if` and others add the arguments, `connect`, and `ask`."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from pipeline.errors import ConfigError
from pipeline.running.installations import find_installation
from pipeline.running.state import STATE, read_state
from pipeline.terminal.printing import visible

URL_VARIABLE, KEY_VARIABLE = "JOURNEYWORK_URL", "JOURNEYWORK_API_KEY"
_OWN_KEY = Path("keys", "operator.key")
"""The operator's key that `journeywork prepare` makes, in the run directory."""
_TIMEOUT_S = 90.0
"""A decision loads its version before it is published."""


class GatewayError(Exception):
    """The gateway does not answer, refuses a request, or something else answers in its place, such as a proxy. `status`
    is that of the answer, 0 if there was none; `code` is the error's code in its body, empty if there is none."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, `--run-dir` and `--key`, which `connect` reads."""
    parser.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    parser.add_argument("--url", help=f"the gateway; default: {URL_VARIABLE}, else that of the installation")
    parser.add_argument(
        "--key",
        help=f"an operator's key; default: {KEY_VARIABLE}, else keys/operator.key of the installation. The variable is "
        "better: other users of this machine see the arguments of a command",
    )


def connect(args: argparse.Namespace) -> GatewayApi:
    """Return the gateway that the arguments of `add_arguments` name, with the key that they give, else that of the
    installation, if it has one. Raises `ConfigError` if they name none, or an installation that does not run one."""
    url = args.url or ("" if args.run_dir else os.environ.get(URL_VARIABLE, ""))
    folder: Path | None = None
    if not url:
        folder = find_installation(args.run_dir)
        state = read_state(folder)
        if state is None:
            raise ConfigError(f"{folder} has no {STATE}: start it with `journeywork up`, or name a gateway with --url")
        url = state.url("gateway")
        if not url:
            raise ConfigError(
                f"{folder} is stopped, or has no gateway: start it with `journeywork up`, or name a gateway with --url"
            )
    key = args.key or os.environ.get(KEY_VARIABLE, "")
    if not key and folder is not None and (folder / _OWN_KEY).is_file():
        key = (folder / _OWN_KEY).read_text("utf-8").strip()
    return GatewayApi(url, key)


def say_what_is_awaited(*versions: str) -> None:
    """Write to standard error that the next request waits for `versions`, which may take a minute: a decision about a
    version is answered once inference servers have loaded it."""
    sys.stderr.write(visible(f"waiting until inference servers hold {' and '.join(versions)}\n"))


class GatewayApi:
    """Sends requests to one gateway."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key` is empty for a gateway without keys. Raises `ConfigError` for an address that is none."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"the gateway's address {self.url!r} must begin with http:// or https://")
        self.key = key

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the JSON object of the answer. `path` begins with a slash; `body` is sent as JSON.
        Raises `GatewayError`, with the gateway's message if there is one."""
        try:
            # The environment's proxies are for the internet, not for the gateway.
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
                headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
                answer = client.request(method, self.url + path, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise GatewayError(
                f"the gateway at {self.url} does not answer ({type(error).__name__}): is `journeywork up` running?"
            ) from error
        content: Any = None
        with suppress(ValueError):  # a proxy may answer with a page
            content = answer.json()
        if answer.is_error:
            details = content.get("error") if isinstance(content, dict) else None
            details = details if isinstance(details, dict) else {}
            message = details.get("message") or f"the gateway answered {answer.status_code}"
            if answer.status_code == 401:
                message += f" Give an operator's key with --key or {KEY_VARIABLE}."
            raise GatewayError(message, answer.status_code, details.get("code") or "")
        if not isinstance(content, dict):
            message = f"{self.url} answered {answer.status_code} without a JSON object: is it the gateway's address?"
            raise GatewayError(message, answer.status_code)
        return content
