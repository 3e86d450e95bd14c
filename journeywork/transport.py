"""What every request to a gateway needs: errors, backoff, and reading the response.

`journeywork.client` sends the requests. After one that failed it asks here whether another attempt may help
(`transport_problem`, `RETRIED_STATUSES`), and how long to pause before it (`Backoff`)."""

from __future__ import annotations

import logging
import math
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import httpx

_log = logging.getLogger("journeywork")

RETRIED_STATUSES = (429, 502, 503, 504)
CONFLICT = 409
TOO_MANY = 429
NOT_FOUND = 404
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_WARN_AFTER_S, _WARN_EVERY_S = 3.0, 30.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""OpenSSL's reasons when the other side answers in plain text."""
_PROBLEM_CHARACTERS = 200
"""Characters of a response's body that an error message quotes."""


class JourneyworkError(Exception):
    """The gateway refused a request. `status` is the HTTP status, `code` the error code of docs/gateway.md."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GatewayUnavailableError(JourneyworkError):
    """The gateway was unreachable or overloaded until `wait_s` was over."""


class Backoff:
    """Exponential backoff, for at most `wait_s` seconds."""

    _warned: ClassVar[dict[str, float]] = {}
    """When a warning was last logged, by the gateway's URL or `groups_ahead`. All requests of the process share it, as
    many of them wait for one gateway at the same time."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._pause_s = wait_s, _FIRST_PAUSE_S
        self._began = time.monotonic()
        self._end = self._began + wait_s

    def report_unreachable(self, url: str, problem: str) -> str:
        """Return a message of `problem`, the gateway's URL and what to check. Log it at this process's first failure,
        because the URL may be wrong, and every `_WARN_EVERY_S` of a failure that lasts; not once `wait_s` is over,
        because an error says it then."""
        now = time.monotonic()
        message = f"the gateway {url} can't be reached ({problem}): check this address, and that the gateway runs"
        due = url not in self._warned or (
            now - self._began >= _WARN_AFTER_S and now - self._warned[url] >= _WARN_EVERY_S
        )
        if due and now < self._end:
            self._warned[url] = now
            _log.warning("%s; trying for %.0f s more", message, self._end - now)
        return message

    def wait_for_training(self, reply: httpx.Response) -> None:
        """Begin to count `wait_s` again if the gateway lets no group begin before others are trained: it is reachable,
        and the wait ends with the next steps. Log a warning now and then."""
        if reply.status_code != TOO_MANY or b'"groups_ahead"' not in reply.content:
            return
        now = time.monotonic()
        self._end = now + self._wait_s
        if now - self._began >= _WARN_AFTER_S and now - self._warned.get("groups_ahead", -math.inf) >= _WARN_EVERY_S:
            self._warned["groups_ahead"] = now
            _log.warning("a new group waits until the trainer has trained others (gateway.max_groups_ahead)")

    def next_pause(self, last_problem: str, retry_after_s: float = 0.0) -> float:
        """Return the seconds to wait before the next attempt: at least `retry_after_s`, but not beyond the end.

        Raises `GatewayUnavailableError` with `last_problem` if `wait_s` is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            waited_s = round(time.monotonic() - self._began, 1)
            raise GatewayUnavailableError(f"gave up after {waited_s:g} s; last problem: {last_problem}")
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return min(max(pause, retry_after_s), left)


def retry_after_s(reply: httpx.Response) -> float:
    """Return the seconds in the header `Retry-After`; 0 without the header, or if it holds a date."""
    value = reply.headers.get("retry-after", "").strip()
    return float(value) if value.isdecimal() else 0.0


def status_problem(reply: httpx.Response) -> str:
    """Return what an error says of a response that was no success: its status and the beginning of its body."""
    return f"status {reply.status_code}: {reply.text[:_PROBLEM_CHARACTERS]}"


def gateway_url(url: str | None) -> str:
    """Return the URL without `/v1`. Raises `ValueError` if it is missing, or is no HTTP URL with a host."""
    address = url or os.environ.get("JOURNEYWORK_URL")
    if not address:
        raise ValueError("no gateway URL: pass `url` or set the environment variable JOURNEYWORK_URL")
    if not address.startswith(("http://", "https://")):
        hint = f": write 'http://{address}'" if "://" not in address else ""
        raise ValueError(f"the gateway URL {address!r} must begin with http:// or https://{hint}")
    try:
        host = httpx.URL(address).host
    except httpx.InvalidURL as error:
        raise ValueError(f"the gateway URL {address!r} is not valid: {error}") from error
    if not host:
        raise ValueError(f"the gateway URL {address!r} names no host: write http://<host>:<port>")
    return address.rstrip("/").removesuffix("/v1")


def transport_problem(error: httpx.TransportError) -> str:
    """Return the message of an error that another attempt may not meet.

    Raises `JourneyworkError` for one that every attempt meets: a request that cannot be sent, or a certificate that is
    not trusted."""
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        raise JourneyworkError(f"the request cannot be sent: {text}") from error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", "") in _NO_TLS:
            raise JourneyworkError(f"the server does not speak TLS ({text}): write http:// in the URL") from error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise JourneyworkError(
                f"the gateway's certificate is not trusted: {text}. Name the file of its certificate authority in the "
                "environment variable SSL_CERT_FILE"
            ) from error
        cause = cause.__cause__ or cause.__context__
    return text


@contextmanager
def plain_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise the first error of an `ExceptionGroup` in place of the group, if all its errors are of `kinds`.

    A task group cancels the other tasks after the first error: what they raise is of no further use."""
    try:
        yield
    except ExceptionGroup as group:
        expected, others = group.split(kinds)
        if expected is None or others is not None:
            raise
        first: BaseException = expected
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


def authorization(api_key: str) -> dict[str, str]:
    """Return the headers that send an API key, without the white space around it; none for an empty key.

    Raises `ValueError`, which does not tell the key, if it holds a character that no header may hold. httpx reports
    such a header as a transport error, which would be retried."""
    key = api_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            "the API key holds a character that an HTTP header cannot: a line break, a control character or one "
            "outside ASCII; check where the key comes from"
        )
    return {"authorization": f"Bearer {key}"} if key else {}


def json_of(reply: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response. Raises `JourneyworkError` for an error or another server's answer."""
    try:
        body = reply.json()
    except ValueError:
        body = None
    if reply.is_success and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        message, code = str(error.get("message", reply.text)), str(error.get("code") or "")
        raise JourneyworkError(message, status=reply.status_code, code=code)
    kind = "JSON that no gateway sends" if body is not None else reply.headers.get("content-type", "no content type")
    raise JourneyworkError(
        f"{reply.url} returned status {reply.status_code} with {kind}: is this the gateway's URL? The body begins: "
        f"{reply.text[:_PROBLEM_CHARACTERS]!r}",
        status=reply.status_code,
    )
