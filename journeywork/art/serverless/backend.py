"""The name under which ART's programs use a remote backend."""

from __future__ import annotations

from journeywork.art.remote import RemoteBackend


class ServerlessBackend(RemoteBackend):
    """`RemoteBackend` with the arguments of ART's class: `base_url` is the gateway's URL ($JOURNEYWORK_URL)."""

    def __init__(self, *, api_key: str | None = None, base_url: str | None = None) -> None:
        super().__init__(base_url, api_key=api_key)
