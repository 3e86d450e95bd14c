"""The routes of the control API, one row each. `app` finds the row of a request, checks its key, and calls the
handler."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import unquote_to_bytes

from rollout_gateway.api import feedback, groups, models, records, tokens, trajectories
from rollout_gateway.api.gateway import ControlRequest
from rollout_gateway.capture.identity import KeyKind
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.promotion import Action

Handler = Callable[[ControlRequest], Awaitable[Any]]
"""Returns what is encoded as JSON, or a `RawAnswer`. Raises `ApiError`."""


@dataclass(frozen=True)
class Route:
    """One row: a method and path, and what answers it."""

    method: str
    path: str
    """A parameter `{name}` is one segment of the path, `{name+}` may hold slashes."""
    handler: Handler
    auth: KeyKind = "agent"
    """The key that it takes."""
    status: int = 200
    """Of a successful answer."""
    opens: bool = False
    """Whether it opens a run. Such a request is refused while the gateway stops."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the path without its outer slashes. Groups: the parameters."""
        return re.compile(re.sub(r"\{\w+(\+?)\}", lambda m: "(.+)" if m[1] else "([^/]+)", self.path.strip("/")))


_RUN = "/v1/trajectories/{trajectory}"
ROUTES = (
    Route("GET", "/health", models.get_health, "none"),
    Route("GET", "/metrics", models.get_metrics, "operator"),
    Route("GET", "/v1/models", models.get_models, "call"),
    Route("GET", "/v1/models/{model+}", models.get_model, "call"),
    Route("GET", "/v1/policies", models.get_policies),
    *(
        Route("POST", f"/v1/policies/{{model}}/{action}", functools.partial(models.decide, action=action), "operator")
        for action in get_args(Action)
    ),
    Route("POST", "/v1/trajectories", trajectories.open_trajectory, status=201, opens=True),
    Route("GET", _RUN, trajectories.get_trajectory, "trajectory"),
    Route("POST", f"{_RUN}/complete", trajectories.complete, "completion"),
    Route("POST", f"{_RUN}/feedback", feedback.on_trajectory, "feedback", status=201),
    Route("POST", "/v1/feedback", feedback.on_answers, "feedback", status=201),
    Route("GET", "/v1/groups/{group}", groups.get_group),
    Route("POST", "/v1/groups/{group}/complete", groups.complete_group),
    Route("POST", "/v1/evaluations", records.record_evaluation, status=201),
    Route("POST", "/tokenize", tokens.tokenize, "call"),
    Route("POST", "/v1/messages/count_tokens", tokens.count_tokens, "call"),
)


def find_route(method: str, path: str) -> tuple[Route, list[str]]:
    """Return the route of a path, and the decoded values of its parameters. `path`: still percent-encoded, without the
    query, as Latin-1 text. Raises a 400, 404 or 405 `ApiError`."""
    allowed = []
    for route in ROUTES:
        match = route.pattern.fullmatch(path.strip("/"))
        if match is not None:
            if route.method == method:
                return route, [decode_segment(value) for value in match.groups()]
            allowed.append(route.method)
    if allowed:
        raise not_allowed(*allowed)
    message = f"There is no route {method} {path}."
    if not path.startswith("/v1/") or path.count("/v1/") > 1 or path.count("/completions") > 1:
        message += " Give your client the base URL with /v1 at its end, such as http://127.0.0.1:8700/v1."
    raise ApiError(404, "unknown_url", message)


def decode_segment(segment: str) -> str:
    """Decode the percent-encoding of one segment of a path, which may hold a slash. Raises a 400 `ApiError` if it is
    not UTF-8."""
    try:
        return unquote_to_bytes(segment.encode("latin-1")).decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, "invalid_url", f"{segment[:200]!r} in the URL is not UTF-8.") from error


def not_allowed(*allowed: str) -> ApiError:
    """Return the 405 for a URL that exists for other methods, which are `allowed`."""
    methods = ", ".join(dict.fromkeys(allowed))
    headers = ((b"allow", methods.encode()),)
    return ApiError(405, "method_not_allowed", f"This URL takes {methods}.", headers=headers)
