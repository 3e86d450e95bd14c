"""The control API's table: one row a route, from which requests are dispatched and `openapi` writes its document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from rollout_gateway.api.auxiliary import CountBody, TextBody, TokensBody
from rollout_gateway.api.control import CompletionBody, GroupBody, Opening
from rollout_gateway.capture.identity import KeyKind
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.promotion import Decision


@dataclass(frozen=True)
class Route:
    """`name` is what `App` calls it; `answer` names the schema of its answer in `openapi`."""

    method: str
    path: str
    name: str
    summary: str
    body: type[Any] | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    answer: str = ""
    errors: tuple[int, ...] = ()
    """Statuses it may answer with beside those that any route may."""
    key: KeyKind = "agent"
    parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.path.strip("/").split("/")))


_ASIDE = (400, 404, 413, 500, 502, 503)
_DECIDED: dict[str, Any] = {
    "body": Decision, "key": "operator", "answer": "Decided", "errors": (400, 404, 409, 413, 503),
}  # fmt: skip

ROUTES = (
    Route("GET", "/health", "health", "Whether the gateway answers, and (with a key, where there are keys) which inference servers can", key="", answer="Health"),
    Route("GET", "/metrics", "metrics", "Counts in Prometheus' format", key="operator"),
    Route("GET", "/openapi.json", "openapi", "This document", key="", answer="Anything"),
    Route("GET", "/v1/models", "models", "Names that `model` may hold", key="call", answer="ModelList"),
    Route("GET", "/v1/models/{model}", "model", "One of them", key="call", answer="Model", errors=(404,)),
    Route("GET", "/v1/policies", "policies", "What each model's name stands for now, and what is loaded", answer="PolicyList"),
    Route("GET", "/v1/policies/events", "watch", "Server-sent events: versions published, loaded, promoted"),
    Route("POST", "/v1/policies/{model}/promote", "decide", "Serve this version under the model's name", **_DECIDED),
    Route("POST", "/v1/policies/{model}/pin", "decide", "Keep serving this version, whatever is trained", **_DECIDED),
    Route("POST", "/v1/policies/{model}/rollback", "decide", "Go back to this or the previous version", **_DECIDED),
    Route("POST", "/v1/policies/{model}/split", "decide", "Share trajectories out over two versions", **_DECIDED),
    Route("POST", "/v1/policies/{model}/follow", "decide", "Serve the newest version again", **_DECIDED),
    Route(
        "POST", "/v1/trajectories", "open", "Open a trajectory", Opening, 201, answer="Opened",
        errors=(400, 404, 409, 413, 429, 503),
    ),
    Route(
        "GET", "/v1/trajectories", "list", "Open trajectories that this gateway replica knows, newest first",
        query=("group", "model", "limit", "after"), answer="TrajectoryList", errors=(400,),
    ),
    Route(
        "GET", "/v1/trajectories/{trajectory}", "get", "A trajectory as the log has it", key="trajectory",
        answer="Trajectory", errors=(400, 404, 503),
    ),
    Route(
        "POST", "/v1/trajectories/{trajectory}/complete", "complete", "End a trajectory", CompletionBody, key="trajectory",
        answer="Completed", errors=(400, 404, 409, 413, 503),
    ),
    Route(
        "POST", "/v1/groups/{group}/complete", "complete_group", "End all trajectories of a group at once", GroupBody,
        answer="GroupCompleted", errors=(400, 404, 409, 413, 503),
    ),
    Route("GET", "/version", "version", "The inference server's version", answer="Anything", errors=(502, 503), key="call"),
    Route("GET", "/ping", "ping", "Whether the gateway answers", key=""),
    Route("POST", "/ping", "ping", "Whether the gateway answers", key=""),
    Route("POST", "/tokenize", "tokens", "Tokens of a text or of messages", TextBody, answer="Anything", errors=_ASIDE, key="call"),
    Route("POST", "/detokenize", "tokens", "The text of tokens", TokensBody, answer="Anything", errors=_ASIDE, key="call"),
    Route(
        "POST", "/v1/messages/count_tokens", "count_tokens", "How many tokens a message's prompt has", CountBody,
        answer="Anything", errors=_ASIDE, key="call",
    ),
    Route(
        "GET", "/v1/responses/{response}", "response", "A response of a trajectory again, from the log", answer="Anything",
        errors=(400, 404, 503), key="call",
    ),
)  # fmt: skip

MODEL_CALLS = {
    "/v1/chat/completions": "OpenAI's chat completion, plain or streamed",
    "/v1/completions": "OpenAI's completion, plain or streamed",
    "/v1/responses": "OpenAI's response, plain or streamed",
    "/v1/messages": "Anthropic's message, plain or streamed",
}


def find(method: str, path: str) -> tuple[Route, list[str]]:
    """The route of a path as it came, and the values of the path's parameters. Raises a 400, 404 or 405 `ApiError`."""
    parts = [decoded(part) for part in path.strip("/").split("/")]
    allowed = []
    for route in ROUTES:
        values = _match(route, parts)
        if values is not None:
            if route.method == method:
                return route, values
            allowed.append(route.method)
    if allowed:
        raise not_allowed(*allowed)
    raise ApiError(404, f"There is no {method} {path} here.", kind="not_found_error", code="unknown_url")


def decoded(part: str) -> str:
    """A part of a path, its percent-encoding undone, once: an id may hold a slash or a percent sign. Raises a 400 `ApiError`
    for what is no UTF-8, so that no two paths mean one id."""
    try:
        return (
            part if part.isascii() and "%" not in part else unquote_to_bytes(part.encode("latin-1")).decode()
        )
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The URL's {part[:200]!r} is no UTF-8.", code="invalid_url") from error


def not_allowed(*allowed: str) -> ApiError:
    methods = ", ".join(dict.fromkeys(allowed))
    return ApiError(
        405, f"This URL takes {methods}.", code="method_not_allowed", headers=((b"allow", methods.encode()),)
    )


def _match(route: Route, parts: list[str]) -> list[str] | None:
    wanted = route.parts
    if route.name == "model" and len(parts) > len(wanted):  # model names may hold slashes
        parts = [*parts[: len(wanted) - 1], "/".join(parts[len(wanted) - 1 :])]
    if len(parts) != len(wanted):
        return None
    values = []
    for part, want in zip(parts, wanted, strict=True):
        if want.startswith("{"):
            if not part:
                return None
            values.append(part)
        elif part != want:
            return None
    return values
