"""What the gateway says when it can't do what was asked: one class, OpenAI's error format on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ApiError(Exception):
    """An answer with an error status. `kind` is OpenAI's `type`, `code` what a program should compare."""

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


class ClientGoneError(Exception):
    """The client closed its connection before its request was answered."""


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """`{"error": {...}}` as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def invalid_json(detail: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON for this call: {detail}", code="invalid_json")


def unknown_model(model: str, known: Sequence[str]) -> ApiError:
    return ApiError(
        404,
        f"The model {model!r} does not exist. There are: {', '.join(known)}.",
        kind="not_found_error",
        code="model_not_found",
        param="model",
    )


def unknown_trajectory(trajectory: str) -> ApiError:
    return ApiError(
        404,
        f"No trajectory {trajectory!r} can be reached by this caller: either it was not opened in this project, or another key "
        "opened it. Open one with POST /v1/trajectories.",
        kind="not_found_error",
        code="trajectory_not_found",
    )


def invalid_key() -> ApiError:
    """The same for every key that is not good, so that nothing can be learned by trying."""
    return ApiError(
        401,
        "This gateway does not know this API key, or it has expired or been revoked.",
        kind="authentication_error",
        code="invalid_api_key",
    )


def wrong_key(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def already_completed(trajectory: str, what: str) -> ApiError:
    return ApiError(
        409,
        f"Trajectory {trajectory!r} is completed: {what}.",
        kind="conflict_error",
        code="trajectory_completed",
    )


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code=code,
        headers=((b"retry-after", str(retry_after_s).encode()),),
    )


def stopping() -> ApiError:
    return unavailable("The gateway is stopping. Try again.", "stopping", retry_after_s=1)


def too_many_calls() -> ApiError:
    return ApiError(
        429,
        "This gateway has as many calls under way as gateway.max_calls allows.",
        kind="rate_limit_error",
        code="too_many_calls",
        headers=((b"retry-after", b"1"),),
    )


def timed_out() -> ApiError:
    return ApiError(
        504, "The inference server did not answer in time.", kind="timeout_error", code="upstream_timeout"
    )
