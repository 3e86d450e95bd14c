"""`/openapi.json`: OpenAPI 3.1 of the whole API, generated from the routes and their request and response structs.

A fuzzer compares the document with what the gateway does (tests/rollout_gateway/api/test_openapi.py). For model
calls only the fields the gateway itself reads are described; all others are passed to the inference server.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec

from rollout_gateway.api import schemas
from rollout_gateway.api.routes import EVENTS, JSON, MODEL_CALLS, ROUTES, TEXT, Route

Schema = dict[str, Any]

_STATUSES = {
    400: "The request is not valid",
    401: "The key is missing or not valid",
    403: "The key does not permit this",
    404: "The resource does not exist",
    409: "Conflicts with the resource's current state",
    410: "The trajectory expired",
    413: "The body is too large",
    415: "The content encoding is not supported",
    421: "`Host` does not name this gateway",
    429: "Too many requests: try again after `Retry-After`",
    500: "The inference server reported an error",
    502: "The inference server's answer can't be used",
    503: "Not available now: try again after `Retry-After`",
    504: "The inference server did not answer in time",
}
_ERRORS_OF_ANY_ROUTE = {400, 403, 421}
"""Any route may return these: 400 malformed Host, 403 web page from another origin, 421 Host that is not this
gateway's."""
_WITH_KEY = {401, 403, 429}
"""Any route that needs an API key may return these too."""


@functools.cache
def encoded() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(document())


def document() -> Schema:
    """The whole document."""
    structs = [
        schemas.Error,
        schemas.MessagesError,
        schemas.CallAnswer,
        *(body for _, body in MODEL_CALLS.values()),
    ]
    structs += [s for route in ROUTES for s in (route.body, route.answer) if s is not None]
    _, components = msgspec.json.schema_components(
        dict.fromkeys(structs), ref_template="#/components/schemas/{name}"
    )
    paths: Schema = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    for path, (summary, body) in MODEL_CALLS.items():
        paths[path] = {"post": _model_call(path, summary, body)}
        named = {
            **_model_call(path, f"{summary}, for a trajectory", body),
            "parameters": [_parameter("trajectory", "path")],
        }
        paths["/t/{trajectory}" + path] = {"post": named}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Journeywork gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route) -> Schema:
    errors = {*route.errors, *_ERRORS_OF_ANY_ROUTE, *(_WITH_KEY if route.auth else ())}
    # The handler's name alone is not unique (`decide` serves several paths): add the method and the end of the path.
    words = (route.name, route.method.lower(), *re.findall(r"[\w.]+", route.path)[-2:])
    operation: Schema = {
        "summary": route.summary,
        "operationId": "_".join(words).replace(".", "_"),
        "parameters": [_parameter(name, "path") for name in re.findall(r"{(\w+)}", route.path)]
        + [_parameter(name, "query") for name in route.query],
        "responses": {
            str(route.status): {"description": "Success", "content": _content(route)},
            **{str(status): _error(route.path, status) for status in sorted(errors)},
        },
    }
    if route.body is not None:
        # The body may be omitted if every field has a default.
        required = any(field.required for field in msgspec.structs.fields(route.body))
        operation["requestBody"] = {"content": {JSON: {"schema": _ref(route.body)}}, "required": required}
    return operation


def _content(route: Route) -> Schema:
    answer = {JSON: _ref(route.answer) if route.answer else {"type": "object"}, TEXT: {"type": "string"}}
    return {route.media_type: {"schema": answer[route.media_type]} if route.media_type in answer else {}}


def _model_call(path: str, summary: str, body: type[Any]) -> Schema:
    answers = {JSON: {"schema": _ref(schemas.CallAnswer)}, EVENTS: {}}
    return {
        "summary": summary,
        "requestBody": {"content": {JSON: {"schema": _ref(body)}}, "required": True},
        "responses": {
            "200": {
                "description": "The response; server-sent events if `stream` is true",
                "content": answers,
            },
            **{str(status): _error(path, status) for status in _STATUSES},
        },
    }


def _ref(struct: type[Any]) -> Schema:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _error(path: str, status: int) -> Schema:
    struct = schemas.MessagesError if path.startswith("/v1/messages") else schemas.Error
    return {"description": _STATUSES[status], "content": {JSON: {"schema": _ref(struct)}}}


def _parameter(name: str, where: str) -> Schema:
    schema: Schema = {"type": "string"}
    if name == "limit":
        schema = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    elif where == "path":
        schema = msgspec.json.schema(schemas.Name)
    return {"name": name, "in": where, "required": where == "path", "schema": schema}
