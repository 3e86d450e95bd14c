"""A request of the control API, as its handler gets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import parse_qsl

from pipeline.events import TrajectoryOpened
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import Gateway
from rollout_gateway.http.body import read_body
from rollout_gateway.http.request import HeaderList, Request

_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class ControlRequest:
    """A request whose key permits its route."""

    gateway: Gateway
    http: Request
    access: Access
    values: list[str]
    """Values of the path's parameters."""

    @property
    def query(self) -> dict[str, str]:
        """Parameters of the URL's query. Of repeated ones the last one counts."""
        return dict(parse_qsl(self.http.target.partition("?")[2], keep_blank_values=True))

    def read(self, kind: type[_T]) -> _T:
        """The body as `kind`; an empty body is an empty object. Raises a 400 `ApiError` that says what is wrong with
        it."""
        return read_body(self.http.body or b"{}", kind)

    def charging(self, runs: int) -> AbstractContextManager[list[str]]:
        """Count the request as so many calls of its key (`ApiKeys.charging`)."""
        return self.gateway.api_keys.charging(self.access, hash((self.http.target, self.http.body)), runs)

    def reading(self, opened: TrajectoryOpened) -> AbstractAsyncContextManager[Callable[[int], None]]:
        """Count what is read of a run as calls of the request's key (`ApiKeys.reading`)."""
        access = self.access
        owner = opened.owner if access.trajectory else access.owner
        return self.gateway.api_keys.reading(owner, feedback_only=access.feedback_only)


@dataclass(eq=False, slots=True)
class RawAnswer:
    """An answer that is encoded already."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: HeaderList = ()
