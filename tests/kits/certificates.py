"""One TLS context for all clients of httpx in a test process: each would read the certificates of all authorities anew,
which takes 30 to 60 ms of processor time, and tests make thousands of clients."""

import functools
import os
import ssl
from typing import Any

import certifi

_create = ssl.create_default_context
_shared = functools.cache(lambda cafile: _create(cafile=cafile))


def _create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
    """As `ssl.create_default_context`. What httpx asks for by default, and with `trust_env=False`, is made once; a
    client with a certificate of its own would change it, and no test has such a client."""
    for authorities in (os.environ.get("SSL_CERT_FILE"), certifi.where()):
        if authorities and not args and options == {"cafile": authorities}:
            return _shared(authorities)
    return _create(*args, **options)


def share_contexts() -> None:
    ssl.create_default_context = _create_default_context  # type: ignore[assignment]
