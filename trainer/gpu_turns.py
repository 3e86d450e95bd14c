"""One GPU that the inference server and the trainer use by turns (`vllm.sleep`). `trainer.service` computes each step,
and loads the models, within `GpuTurns.turn`.

While the trainer computes, vLLM sleeps at level 1 (docs.vllm.ai, "Sleep Mode"): its weights move to the machine's
memory, its cache is dropped, calls that run end first, and new calls wait. While vLLM serves, the trainer's base model
is in the machine's memory. Trainers of one run directory, such as that of a branch, have no turns at once: a lock on a
file, which the kernel releases when one dies, keeps them apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import httpx
import torch
from anyio.to_thread import run_sync

from pipeline.config import Config, ConfigError
from pipeline.files import try_lock
from pipeline.security.server_key import api_key
from pipeline.telemetry.logs import get_logger
from trainer.engine.model import PolicyModel

logger = get_logger("trainer")

_MOVE_S = 300.0
"""Longest time for moving a server's weights; calls that run may take `gateway.replicas.timeout_s` more."""
_POLL_S = 0.2
"""Seconds between two attempts to lock the file while another trainer has its turn."""


class GpuTurns:
    """Gives the trainer its turns on the GPU. Without `vllm.sleep` every block is a turn, and nothing sleeps."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` if the servers' key can't be read."""
        self._urls, self._lock = config.vllm.urls if config.vllm.sleep else (), config.path("gpu.lock")
        key = api_key(config) if self._urls else ""
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_MOVE_S + config.gateway.replicas.timeout_s,
            trust_env=False,
        )
        self._models: list[PolicyModel] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The trainer's turn: the servers sleep, and the trainer's base models are on the GPU, until the block ends.
        Raises `ConfigError` if a server can't sleep, `httpx.HTTPError` if one fails to; a server that is down holds no
        memory."""
        if not self._urls:
            yield
            return
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as lock:
            while not try_lock(lock):  # noqa: ASYNC110 - the kernel can only be asked
                await anyio.sleep(_POLL_S)
            try:
                # A server that is told to sleep does so once its calls have ended, and must not after it was woken.
                with anyio.CancelScope(shield=True):
                    if not self._models:
                        await self._post("wake_up")  # a trainer before this one may have died in its turn
                    await self._post("sleep?level=1&mode=wait")
                    await run_sync(partial(self._move, to_gpu=True))
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await run_sync(partial(self._move, to_gpu=False))
                    await self._post("wake_up")

    def add(self, models: Iterable[PolicyModel]) -> None:
        """Move `models` to the GPU at the start of each turn from now on, and to the machine's memory at its end.
        Models of learners that share an engine may be named several times."""
        self._models = list({id(model): model for model in models}.values())

    async def aclose(self) -> None:
        """Close the connections to the servers."""
        await self._client.aclose()

    def _move(self, *, to_gpu: bool) -> None:
        """Move the base models to the GPU, or to the machine's memory."""
        for model in self._models:
            model.move_base(model.device if to_gpu else torch.device("cpu"))

    async def _post(self, action: str) -> None:
        """Tell every server to do something: `sleep?…` or `wake_up`. Raises as `turn` does."""
        for url in self._urls:
            try:
                response = await self._client.post(f"{url}/{action}")
            except httpx.ConnectError as error:
                logger.warning("the inference server does not answer", url=url, action=action, exc=error)
                continue
            if response.status_code == httpx.codes.NOT_FOUND:
                raise ConfigError(
                    f"vllm.sleep: {url} can't sleep: start it with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or "
                    "let `journeywork up` start it"
                )
            response.raise_for_status()
