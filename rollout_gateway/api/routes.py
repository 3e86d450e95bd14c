"""The routes of the API, one row each. Requests are dispatched by them, and `openapi` writes the document from them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from rollout_gateway.api import schemas as s
from rollout_gateway.capture.identity import KeyKind
from rollout_gateway.capture.registry import Completion
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.promotion import Decision, DecisionAnswer, SplitDecision, VersionDecision

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"


@dataclass(frozen=True)
class Route:
    """One row."""

    method: str
    path: str
    name: str
    """Key of the handler in `handlers.handler_table`."""
    summary: str
    body: type[Any] | None = None
    answer: type[Any] | None = None
    """`None`: an answer whose fields are not described."""
    errors: tuple[int, ...] = ()
    """Statuses beside those that any route may answer."""
    auth: KeyKind = "agent"
    status: int = 200
    query: tuple[str, ...] = ()
    media_type: str = JSON
    """Media type of the answer."""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the path without its outer slashes. Groups: the parameters. A model's name may hold slashes."""
        parameter = "(.+)" if self.name == "model" else "([^/]+)"
        return re.compile(re.sub(r"\\{\w+\\}", lambda _: parameter, re.escape(self.path.strip("/"))))


def _decision(action: str, summary: str, body: type[Decision]) -> Route:
    path = f"/v1/policies/{{model}}/{action}"
    return Route("POST", path, "decide", summary, body, DecisionAnswer, (400, 404, 409, 413, 503), "operator")


_WRITES = (400, 404, 409, 413, 503)
_ASKS = (400, 404, 413, 500, 502, 503)
_RUN = "/v1/trajectories/{trajectory}"

ROUTES = (
    Route("GET", "/health", "health", "Whether calls can be answered, and by which servers", answer=s.Health, auth=""),
    Route("GET", "/metrics", "metrics", "Metrics in Prometheus' text format", auth="operator", media_type=TEXT),
    Route("GET", "/openapi.json", "openapi", "This document", auth=""),
    Route("GET", "/v1/models", "models", "Names that `model` may hold", answer=s.ModelList, auth="call"),
    Route("GET", "/v1/models/{model}", "model", "One of these names", answer=s.Model, errors=(404,), auth="call"),
    Route("GET", "/v1/policies", "policies", "What models' names stand for, and what is loaded", answer=s.PolicyList),
    Route("GET", "/v1/policies/events", "watch_policies", "Events about versions", media_type=EVENTS),
    _decision("promote", "Serve this version under the model's name", VersionDecision),
    _decision("pin", "Keep serving this version, whatever is trained", VersionDecision),
    _decision("rollback", "Take back the last decision", Decision),
    _decision("split", "Divide trajectories between two versions", SplitDecision),
    _decision("follow", "Serve the newest version again", Decision),
    Route(
        "POST", "/v1/trajectories", "open", "Open a trajectory", s.Opening, s.Opened, (*_WRITES, 410, 429), status=201
    ),
    Route(
        "GET", "/v1/trajectories", "list", "Open trajectories in this gateway replica's memory, newest first",
        answer=s.TrajectoryList, errors=(400,), query=("group", "model", "limit", "after"),
    ),
    Route("GET", _RUN, "get", "A trajectory on the log", None, s.TrajectoryState, (400, 404, 503), "trajectory"),
    Route(
        "POST", f"{_RUN}/complete", "complete", "Complete a trajectory", Completion, s.Completed,
        (*_WRITES, 410), "trajectory",
    ),
    Route(
        "POST", "/v1/groups/{group}/complete", "complete_group", "Complete trajectories of a group",
        s.GroupCompletion, s.GroupCompleted, (*_WRITES, 410),
    ),
    Route(
        "POST", "/v1/groups/{group}/label", "label", "Record a person's scores of trajectories of a group",
        s.GroupLabels, s.Labeled, _WRITES, "operator",
    ),
    Route(
        "GET", "/v1/groups/{group}", "group", "Whether a group was trained or discarded",
        answer=s.GroupState, errors=(400, 404, 503), query=("model",),
    ),
    Route(
        "POST", "/v1/evaluations", "record_evaluation", "Record the results of one entrant of an evaluation",
        s.EvaluationBody, s.Recorded, _WRITES, status=201,
    ),
    Route("POST", "/tokenize", "tokenize", "Tokens of a prompt", s.TokenizeBody, errors=_ASKS, auth="call"),
    Route(
        "POST", "/v1/messages/count_tokens", "count_tokens", "The number of tokens of a message's prompt",
        s.CountTokensBody, errors=_ASKS, auth="call",
    ),
)  # fmt: skip

MODEL_CALLS: dict[str, tuple[str, type[Any]]] = {
    "/v1/chat/completions": ("OpenAI's chat completion, plain or streamed", s.ChatBody),
    "/v1/completions": ("OpenAI's completion, plain or streamed", s.CompletionsBody),
    "/v1/responses": ("OpenAI's response, plain or streamed", s.ResponsesBody),
    "/v1/messages": ("Anthropic's message, plain or streamed", s.MessagesBody),
}
"""Summary and body of each model call, by path."""


def find(method: str, path: str) -> tuple[Route, list[str]]:
    """The route of a path, and the values of its parameters. Raises a 400, 404 or 405 `ApiError`."""
    allowed = []
    for route in ROUTES:
        match = route.pattern.fullmatch(path.strip("/"))
        if match is not None:
            if route.method == method:
                return route, [decode_segment(value) for value in match.groups()]
            allowed.append(route.method)
    if allowed:
        raise not_allowed(*allowed)
    raise ApiError(404, "unknown_url", f"There is no route {method} {path}.")


def decode_segment(segment: str) -> str:
    """Decode the percent-encoding of one segment of a path, which may hold a slash. Raises a 400 `ApiError` if it is
    not UTF-8."""
    try:
        return unquote_to_bytes(segment.encode("latin-1")).decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, "invalid_url", f"{segment[:200]!r} in the URL is not UTF-8.") from error


def not_allowed(*allowed: str) -> ApiError:
    methods = ", ".join(dict.fromkeys(allowed))
    headers = ((b"allow", methods.encode()),)
    return ApiError(405, "method_not_allowed", f"This URL takes {methods}.", headers=headers)
