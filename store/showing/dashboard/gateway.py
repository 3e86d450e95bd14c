"""Calls to the gateway's API in the name of the dashboard's user."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import anyio.to_thread

from pipeline.config import Config
from pipeline.running.gateway_api import GatewayApi, GatewayError
from pipeline.running.state import read_state
from store.showing.pages.errors import PageError

_READ_S = 2.0
ACTIONS = ("promote", "rollback", "split", "follow")
"""Decisions about the version that a model's name stands for."""


class Gateway:
    """The gateway of a run, if it is running."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def policies(self, key: str) -> list[dict[str, Any]] | None:
        """Return for each model the version that its name stands for, as `GET /v1/policies` has it; `None` if no
        gateway answers."""
        with anyio.move_on_after(_READ_S):
            try:
                return list((await self._ask(key, "GET", "/v1/policies"))["data"])
            except PageError as error:
                if error.status not in (502, 503, 504):  # a proxy may answer for a gateway that does not
                    raise
        return None

    async def decide(self, key: str, model: str, action: str, body: dict[str, Any]) -> None:
        """Change what a model's name stands for. Raises `PageError` with the gateway's status and message."""
        await self._ask(key, "POST", f"/v1/policies/{quote(model, safe='')}/{action}", body)

    async def give_feedback(self, key: str, trajectory: str, body: dict[str, Any]) -> str:
        """Record what a person says of a trajectory. Return its `use`, what settings make of it. Raises
        `PageError`."""
        answer = await self._ask(key, "POST", f"/v1/trajectories/{quote(trajectory, safe='')}/feedback", body)
        return str(answer["signals"][0]["use"])

    async def _ask(self, key: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the gateway's answer to a request with the user's key. Raises `PageError`: a 503 if no gateway
        answers, else with the gateway's status and message."""
        state = read_state(Path(self._config.run_dir))
        url = self._config.ui.gateway_url or (state.url("gateway") if state and "gateway" in state.services else "")
        if not url:
            raise PageError(503, "This run has no gateway: start it with `journeywork up`.")
        ask = partial(GatewayApi(url, key).ask, method, path, body)
        try:
            return await anyio.to_thread.run_sync(ask, abandon_on_cancel=True)
        except GatewayError as error:
            if error.status == 404 and not error.code:  # the gateway's own 404 have a code
                raise PageError(503, f"{url} is another server than the gateway: correct `ui.gateway_url`.") from error
            raise PageError(error.status if error.status >= 400 else 503, str(error)) from error
