"""The control API's table: one row a route, from which requests are dispatched and `/openapi.json` is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from rollout_gateway.control import CompletionBody, GroupBody, Opening
from rollout_gateway.errors import ApiError
from rollout_gateway.promotion import Decision


@dataclass(frozen=True)
class Route:
    """`name` is what `App` calls it."""

    method: str
    path: str
    name: str
    summary: str
    body: type[Any] | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    key: Literal["", "agent", "operator", "trajectory"] = "agent"
    """Whose key it takes, where keys are configured; `trajectory`: an agent's or that of the trajectory in the path."""
    parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.path.strip("/").split("/")))


ROUTES = (
    Route("GET", "/health", "health", "Whether the gateway answers, and which inference servers can", key=""),
    Route("GET", "/metrics", "metrics", "Counts in Prometheus' format", key="operator"),
    Route("GET", "/openapi.json", "openapi", "This document", key=""),
    Route("GET", "/v1/models", "models", "Names that `model` may hold"),
    Route("GET", "/v1/models/{model}", "model", "One of them"),
    Route("GET", "/v1/policies", "policies", "What each model's name stands for now, and what is loaded"),
    Route("GET", "/v1/policies/events", "watch", "Server-sent events: versions published, loaded, promoted"),
    Route("POST", "/v1/policies/{model}/promote", "decide", "Serve this version under the model's name", Decision, key="operator"),
    Route("POST", "/v1/policies/{model}/pin", "decide", "Keep serving this version, whatever is trained", Decision, key="operator"),
    Route("POST", "/v1/policies/{model}/rollback", "decide", "Go back to this or the previous version", Decision, key="operator"),
    Route("POST", "/v1/policies/{model}/split", "decide", "Share trajectories out over two versions", Decision, key="operator"),
    Route("POST", "/v1/policies/{model}/follow", "decide", "Serve the newest version again", Decision, key="operator"),
    Route("POST", "/v1/trajectories", "open", "Open a trajectory", Opening, 201),
    Route(
        "GET", "/v1/trajectories", "list", "Open trajectories that this gateway replica knows, newest first",
        query=("group", "model", "limit"),
    ),
    Route("GET", "/v1/trajectories/{trajectory}", "get", "A trajectory as the log has it", key="trajectory"),
    Route("POST", "/v1/trajectories/{trajectory}/complete", "complete", "End a trajectory", CompletionBody, key="trajectory"),
    Route("POST", "/v1/groups/{group}/complete", "complete_group", "End all trajectories of a group at once", GroupBody),
)  # fmt: skip

MODEL_CALLS = {
    "/v1/chat/completions": "OpenAI's chat completion, plain or streamed",
    "/v1/completions": "OpenAI's completion, plain or streamed",
    "/v1/responses": "OpenAI's response, stateless, plain or streamed",
    "/v1/messages": "Anthropic's message, plain or streamed",
}


def find(method: str, path: str) -> tuple[Route, list[str]]:
    """The route and the values of its path's parameters. Raises a 404 or 405 `ApiError`."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
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


def openapi() -> dict[str, Any]:
    """OpenAPI 3.1 of everything the gateway answers."""
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, components = msgspec.json.schema_components(
        dict.fromkeys(bodies), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": route.path.strip("/").replace("/", "_").translate({123: None, 125: None, 46: 95}) + "_" + route.method.lower(),
            "responses": {str(route.status): {"description": "OK"}, "default": _ERROR},
        }  # fmt: skip
        if route.body is not None:
            schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": True}
        named = [part[1:-1] for part in route.parts if part.startswith("{")]
        operation["parameters"] = [_parameter(name, "path") for name in named]
        operation["parameters"] += [_parameter(name, "query") for name in route.query]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    for path, summary in MODEL_CALLS.items():
        body = {
            "content": {"application/json": {"schema": {"type": "object", "required": ["model"]}}},
            "required": True,
        }
        call = {
            "summary": summary,
            "requestBody": body,
            "responses": {"200": {"description": "OK"}, "default": _ERROR},
        }
        paths[path] = {"post": call}
        paths["/t/{trajectory}" + path] = {
            "post": {
                **call,
                "summary": f"{summary}, for a trajectory",
                "parameters": [_parameter("trajectory", "path")],
            }
        }
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Journeyman gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**components, "Error": error}},
    }


_ERROR = {
    "description": "An error in OpenAI's format",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def _parameter(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
