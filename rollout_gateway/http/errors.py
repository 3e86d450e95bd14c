"""Errors that are answered to clients, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ClientGoneError(Exception):
    """The client closed its connection before its request was answered."""


class ApiError(Exception):
    """An answer with an error status. `kind` is `type` in OpenAI's format. `code` is for programs to compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers = headers

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.code, self.param)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """`{"error": {...}}` in OpenAI's format."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def invalid_json(detail: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {detail}", code="invalid_json")


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    message = f"The model {model!r} does not exist. Available models: {', '.join(known)}."
    return ApiError(404, message, kind="not_found_error", code="model_not_found", param="model")


def unknown_trajectory(trajectory: str) -> ApiError:
    return ApiError(
        404,
        f"Trajectory {trajectory!r} is unknown: it was not opened in this project, or another API key opened it. "
        "Open one with POST /v1/trajectories.",
        kind="not_found_error",
        code="trajectory_not_found",
    )


def invalid_key() -> ApiError:
    """The same error for every invalid key, so that trying keys reveals nothing."""
    return ApiError(
        401,
        "The API key is missing, unknown, expired or revoked.",
        kind="authentication_error",
        code="invalid_api_key",
    )


def wrong_key(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def already_completed(trajectory: str, what: str) -> ApiError:
    message = f"Trajectory {trajectory!r} is completed: {what}."
    return ApiError(409, message, kind="conflict_error", code="trajectory_completed")


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    headers = ((b"retry-after", str(retry_after_s).encode()),)
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=headers)


def stopping() -> ApiError:
    return unavailable("The gateway is stopping. Try again.", "stopping", retry_after_s=1)


def too_many_calls() -> ApiError:
    return ApiError(
        429,
        "The gateway has reached gateway.max_calls. Try again.",
        kind="rate_limit_error",
        code="too_many_calls",
        headers=((b"retry-after", b"1"),),
    )


def timed_out() -> ApiError:
    message = "The inference server did not answer within gateway.replicas.timeout_s."
    return ApiError(504, message, kind="timeout_error", code="upstream_timeout")
