"""`/openapi.json`: OpenAPI 3.1 of everything the gateway answers, from the table of routes and the bodies' types.

What it says is what holds: a fuzzer compares the two (tests/rollout_gateway/api/test_openapi.py). The four model calls are
described as far as the gateway itself reads them; what else they take is the inference server's business.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from rollout_gateway.api.control import Name
from rollout_gateway.api.routes import MODEL_CALLS, ROUTES, Route

Schema = dict[str, Any]

_STATUSES = {
    400: "The request can't be meant",
    401: "No key of this gateway",
    403: "Another's key, or another role's",
    404: "There is no such thing",
    409: "It contradicts what is",
    413: "The body is too large",
    415: "The body is in a coding that is not taken here",
    421: "The name in `Host` is not this gateway's",
    429: "Wait for as long as `Retry-After` says",
    500: "The inference server failed, and said so",
    502: "The inference server answered nonsense",
    503: "Not now: try again after `Retry-After`",
    504: "The inference server did not answer in time",
}
_CALL_ERRORS = tuple(_STATUSES)
_ANY = {400, 403, 421}
"""What any route may answer: to a `Host` that is none, to a foreign web page, and to a foreign name."""
_EITHER = {401, 403, 429}
"""What any route that takes a key may answer."""


def document() -> Schema:
    """The whole document."""
    bodies = dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: Schema = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    for path, summary in MODEL_CALLS.items():
        paths[path] = {"post": _model_call(path, summary)}
        named = {
            **_model_call(path, f"{summary}, for a trajectory"),
            "parameters": [_parameter("trajectory", "path")],
        }
        paths["/t/{trajectory}" + path] = {"post": named}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Journeyman gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**components, **_ANSWERS}},
    }


@functools.cache
def encoded() -> bytes:
    """The document as JSON. Anyone may ask for it, so it is made once."""
    return msgspec.json.encode(document())


def _operation(route: Route) -> Schema:
    named = [part[1:-1] for part in route.parts if part.startswith("{")]
    errors = "MessagesError" if route.path.startswith("/v1/messages/") else "Error"
    operation: Schema = {
        "summary": route.summary,
        "operationId": f"{route.name}_{route.method.lower()}_{'_'.join(p.strip('{}') for p in route.parts[-2:])}".replace(".", "_"),
        "parameters": [_parameter(name, "path") for name in named] + [_parameter(name, "query") for name in route.query],
        "responses": {
            str(route.status): {"description": "Done", "content": _answer(route)},
            **{str(s): _error(s, errors) for s in sorted({*route.errors, *_ANY, *(_EITHER if route.key else ())})},
        },
    }  # fmt: skip
    if route.body is not None:
        schema = _ref(route.body.__name__)
        operation["requestBody"] = {
            "content": {"application/json": {"schema": schema}},
            "required": any(field.required for field in msgspec.structs.fields(route.body)),
        }
    return operation


def _answer(route: Route) -> Schema:
    if route.answer:
        return {"application/json": {"schema": _ref(route.answer)}}
    if route.name == "ping":
        return {}
    if route.name == "watch":
        return {"text/event-stream": {}}
    return {"text/plain": {"schema": {"type": "string"}}}


def _model_call(path: str, summary: str) -> Schema:
    messages = path == "/v1/messages"
    answers = {
        "application/json": {"schema": {"type": "object", "required": ["id", "model"]}},
        "text/event-stream": {},
    }
    return {
        "summary": summary,
        "requestBody": {"content": {"application/json": {"schema": _CALLS[path]}}, "required": True},
        "responses": {
            "200": {"description": "Answered; as events where `stream` is true", "content": answers},
            **{str(s): _error(s, "MessagesError" if messages else "Error") for s in _CALL_ERRORS},
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _error(status: int, name: str = "Error") -> Schema:
    return {"description": _STATUSES[status], "content": {"application/json": {"schema": _ref(name)}}}


def _parameter(name: str, where: str) -> Schema:
    schema: Schema = {"type": "string"}
    if name == "limit":
        schema = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    elif where == "path":
        schema = msgspec.json.schema(Name)
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def _object(required: dict[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _list(item: str, **more: Schema) -> Schema:
    return _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref(item)}, **more})


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ERROR = {"message": _TEXT, "type": _TEXT, "param": _or_null("string"), "code": _or_null("string")}
_NUMBERS: Schema = {"type": "object", "additionalProperties": {"type": "number"}}

_ANSWERS: dict[str, Schema] = {
    "Anything": {"type": "object"},
    "Error": _object({"error": {"type": "object", "required": ["message"], "properties": {"message": _TEXT}}}),
    "MessagesError": _object({"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}),
    "Health": _object({"status": {"const": "ok"}, "serving": {"type": "boolean"}, "log": {"type": "string"}}, replicas={"type": "array"}),
    "Model": _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT}),
    "ModelList": _list("Model"),
    "Policy": _object({
        "model": _TEXT, "version": _TEXT, "step": _COUNT, "newest": _TEXT,
        "loaded": {"type": "array", "items": _TEXT}, "refused": {"type": "object"},
    }),
    "PolicyList": _list("Policy"),
    "Decided": _object({"model": _TEXT, "action": _TEXT, "version": _TEXT, "other": _or_null("string")}),
    "Opened": _object({
        "id": _TEXT, "object": {"const": "trajectory"}, "model": _TEXT, "group": _TEXT, "api_key": _TEXT, "base_url": _TEXT,
    }),
    "Completed": _object({
        "id": _TEXT, "object": {"const": "trajectory"}, "outcome": _TEXT, "reward": _or_null("number"), "exchanges": _COUNT,
    }),
    "GroupCompleted": _list("Completed", group=_TEXT),
    "Trajectory": _object({
        "id": _TEXT, "object": {"const": "trajectory"}, "status": {"enum": ["open", "completed"]}, "project": _TEXT,
        "model": _TEXT, "group": _TEXT, "task": _TEXT, "attempt": _COUNT, "split": {"enum": ["train", "val"]},
        "group_size": _COUNT, "pinned": _or_null("string"), "metadata": {"type": "object"}, "exchanges": _COUNT,
        "opened_at": _COUNT, "outcome": _or_null("string"), "reward": _or_null("number"), "rewards": _NUMBERS,
        "metrics": _NUMBERS,
    }),
    "TrajectoryList": _list("Trajectory", has_more={"type": "boolean"}),
}  # fmt: skip

_SAMPLING: dict[str, Schema] = {
    "model": _TEXT,
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "metadata": {"type": "object", "additionalProperties": _TEXT},
}
_TURNS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object({"role": {"enum": ["user", "assistant"]}, "content": _TEXT}),
}
_MAX_TOKENS: Schema = {"type": "integer", "minimum": 1}


def _call(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": ["model", *required], "properties": {**_SAMPLING, **properties}}


_CALLS: dict[str, Schema] = {
    "/v1/chat/completions": _call(
        "messages",
        messages=_TURNS,
        max_tokens=_MAX_TOKENS,
        n={"type": "integer", "minimum": 1, "maximum": 128},
    ),
    "/v1/completions": _call("prompt", prompt=_TEXT, max_tokens=_MAX_TOKENS),
    "/v1/responses": _call(
        "input", input=_TEXT, instructions=_TEXT, max_output_tokens=_MAX_TOKENS, previous_response_id=_TEXT
    ),
    "/v1/messages": _call("messages", "max_tokens", messages=_TURNS, max_tokens=_MAX_TOKENS, system=_TEXT),
}
