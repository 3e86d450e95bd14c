"""ART's errors of services. `UnsupportedError` is one of them."""

from __future__ import annotations


class ARTError(Exception):
    """An error with the status that an HTTP server would answer."""

    def __init__(self, message: str, status_code: int = 400) -> None:
        super().__init__(message)
        self.detail, self.status_code = message, status_code


class UnsupportedError(ARTError):
    """The program uses a feature of ART that Journeywork does not have. The message says what to do instead."""


UnsupportedBaseModelDeploymentError = UnsupportedLoRADeploymentProviderError = UnsupportedError
LoRADeploymentTimedOutError = ForbiddenBucketCreationError = UnsupportedError
"""Nothing is deployed to a provider or copied to a bucket of its own, so these are never raised by themselves."""
