"""The errors that clients get, in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

Any room of the gateway raises an `ApiError`, and `app` answers with it. Errors that several modules raise are made by
a function here, so that a client reads the same sentence. docs/gateway.md lists all codes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "conflict_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""`type` in OpenAI's format, by status. Of any other status: `invalid_request_error`."""
_RETRY_AFTER_S = {429: 1, 503: 5}


class ClientGoneError(Exception):
    """The client closed its connection before its request was answered."""


class ApiError(Exception):
    """An answer with an error status. `code` is for programs to compare. `param` names the field that is wrong.

    A client may repeat the request after `retry_after_s` seconds, by default 1 for a 429 and 5 for a 503."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        retry_after_s = retry_after_s or _RETRY_AFTER_S.get(status)
        self.headers = (*headers, (b"retry-after", b"%d" % retry_after_s)) if retry_after_s else headers

    def body(self) -> bytes:
        """Return the body of the answer, in OpenAI's format."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def invalid_body(message: str, param: str | None = None) -> ApiError:
    """Return the 400 about a body that is JSON and not valid. `param`: the field that is wrong, if it is one."""
    return ApiError(400, "invalid_body", message, param=param)


def check_repeated_text(field: str, text: str, runs: int, most: int) -> None:
    """Raise a 413 `ApiError` if `text`, the value of the body's `field`, takes more than `most` bytes on the log when
    it is recorded for each of so many runs."""
    if (size := len(text.encode()) * runs) > most:
        message = (
            f"Each of the {runs} runs gets the `{field}`, {size:,} bytes together: at most {most:,} are taken. Send a "
            "shorter one, or name fewer runs in a request."
        )
        raise ApiError(413, "body_too_large", message, param=field)


def check_group_size(field: str, runs: int, most: int) -> None:
    """Raise a 413 `ApiError` if the body's `field` makes a group of more runs than `most`, which is
    `gateway.max_group_size`."""
    if runs > most:
        message = f"`{field}` makes a group of {runs:,} runs; gateway.max_group_size is {most:,}. Make smaller groups."
        raise ApiError(413, "group_too_large", message, param=field)


def unknown_model(model: str, known: Sequence[str], param: str = "model") -> ApiError:
    """Return the 404 for a model that does not exist. `known`: names that could be meant. `param`: the field that names
    the model."""
    message = f"The model {model!r} does not exist. Available models: {', '.join(known)}."
    return ApiError(404, "model_not_found", message, param=param)


def retired_version(version: str, known: Sequence[str], param: str) -> ApiError:
    """Return the 404 for a version whose adapter is deleted. `known`: versions that can be named instead. `param`: the
    field that names the version."""
    message = (
        f"The adapter of {version} is no longer kept (`retention.adapters`). Name a version that is: "
        f"{', '.join(known)}. To serve this one again, make it the newest: `journeywork train --adopt`."
    )
    return ApiError(404, "model_not_found", message, param=param)


def unknown_trajectory(trajectory: str, advice: str = "Open one with POST /v1/trajectories.") -> ApiError:
    """Return the 404 for a trajectory that does not exist or belongs to another key: one error for both, so that nobody
    can find out which ids other keys use."""
    message = (
        f"Trajectory {trajectory!r} is unknown: it was not opened in this project, or another API key opened it. "
        + advice
    )
    return ApiError(404, "trajectory_not_found", message)


def expired_trajectory(trajectory: str, max_age_h: float) -> ApiError:
    """Return the 410 for a trajectory that is older than the log keeps runs, which is `max_age_h` hours."""
    message = (
        f"Trajectory {trajectory!r} expired: it was opened more than {max_age_h:g} hours ago, so the log no longer "
        "holds all of it (nats.rollouts_max_age_h). It takes no calls and no feedback, it can't be completed, and its "
        "id can't be used again."
    )
    return ApiError(410, "trajectory_expired", message)


def invalid_key() -> ApiError:
    """Return the 401 for an invalid key: one error for every reason, so that trying keys reveals nothing."""
    message = (
        "The API key is missing, unknown, expired or revoked. Send `Authorization: Bearer KEY` (`api_key` of an OpenAI "
        "client, JOURNEYWORK_API_KEY of the SDK). `journeywork keys list` shows keys, `journeywork keys add` makes one."
    )
    return ApiError(401, "invalid_api_key", message)


def already_completed(trajectory: str, what: str) -> ApiError:
    """Return the 409 for a trajectory that is completed. `what`: what can't be done any more, as a sentence about
    it."""
    return ApiError(409, "trajectory_completed", f"Trajectory {trajectory!r} is completed: {what}.")


def stopping() -> ApiError:
    """Return the 503 of a gateway that was told to stop. The client may try again: another gateway takes the call, or
    this one after its restart."""
    return ApiError(503, "stopping", "The gateway is stopping. Try again.", retry_after_s=1)


def timed_out(wait_s: float = 0.0) -> ApiError:
    """Return the 504 for an answer that did not come in time. `wait_s`: the time that an apprentice had, if that
    passed; 0 if the inference server's time passed."""
    limit = f"outside.apprentice_wait_s ({wait_s:g} s)" if wait_s else "gateway.replicas.timeout_s"
    message = f"The inference server did not answer within {limit}."
    return ApiError(504, "upstream_timeout", message)


def bad_answer(path: str, error: Exception) -> ApiError:
    """Return the 502 for an answer of the inference server to `path`, with status 200, that can't be decoded."""
    return ApiError(502, "bad_upstream", f"The inference server's answer to {path} can't be read: {error}.")


def answer_too_long(why: Exception) -> ApiError:
    """Return the 502 for an answer of the inference server that is too long. Its header tells clients not to try again,
    as the next answer would be too long too."""
    message = f"The inference server's answer is not taken: {why}. Ask for fewer choices, tokens or logprobs."
    return ApiError(502, "bad_upstream", message, headers=((b"x-should-retry", b"false"),))


def internal_error() -> ApiError:
    """Return the 500 for an unexpected exception, which was logged."""
    return ApiError(500, "internal_error", "Internal error. The gateway's log has the details.")
