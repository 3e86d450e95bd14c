"""Alarms to a webhook: one JSON document each, repeated for ten minutes while the receiver does not take it. Nothing
waits for it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.abc
import httpx

from pipeline.config import Config, ConfigError
from pipeline.config.secrets import REFERENCE
from pipeline.events import AlarmChanged
from pipeline.telemetry.logs import get_logger
from store.alarms.table import BY_NAME

log = get_logger("store.alarms.webhook")

_TIMEOUT_S = 10.0
_PAUSES_S = (1.0, 5.0, 30.0, 120.0, 450.0)
"""Before a post is repeated."""
_TOLD = ("state", "alarm", "project", "model", "about", "value", "threshold", "detail", "action")


def webhook_url(config: Config) -> str:
    """The URL of `alarms.webhook`, with its variables put in; empty if there is none. Raises `ConfigError`, which does
    not hold the URL."""
    missing = [
        name for match in REFERENCE.finditer(config.alarms.webhook)
        if not os.environ.get(name := match.group(1) or match.group(2))
    ]  # fmt: skip
    if missing:
        raise ConfigError(
            f"alarms.webhook: the environment variable {missing[0]} is not set: set it where `journeywork up` starts"
        )
    url = REFERENCE.sub(lambda match: os.environ[match.group(1) or match.group(2)], config.alarms.webhook)
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ConfigError("alarms.webhook: write an address that begins with http:// or https://")
    return url


def message(config: Config, event: AlarmChanged) -> dict[str, str | float | None]:
    """What is posted for a change: names and figures, no content of runs, no key and no path. A figure that is no
    finite number is `None`."""
    title = BY_NAME[event.alarm].title if event.alarm in BY_NAME else event.alarm
    subject = f"{title} of {event.model}" if event.model else title
    return {
        "text": f"{'raised' if event.state == 'raised' else 'over'}: {subject}: {event.detail}",
        "id": event.message_id(), "title": title, "run": Path(config.run_dir).name,
        "since": event.since / 1e6, "at": event.at / 1e6, **{name: getattr(event, name) for name in _TOLD},
        "value": event.value if math.isfinite(event.value) else None,
    }  # fmt: skip


class Webhook:
    """Posts changes, each in a task of its own."""

    def __init__(self, config: Config, tasks: anyio.abc.TaskGroup) -> None:
        """Raises `ConfigError`."""
        self._config, self._url, self._tasks = config, webhook_url(config), tasks

    def send(self, event: AlarmChanged) -> None:
        """Post `event` soon."""
        if self._url:
            self._tasks.start_soon(self._post, event)

    async def _post(self, event: AlarmChanged) -> None:
        """Post one change until the receiver takes it, or all `_PAUSES_S` are over."""
        why = ""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            for pause_s in (0.0, *_PAUSES_S):
                await anyio.sleep(pause_s)
                try:
                    answer = await client.post(self._url, json=message(self._config, event))
                    if answer.is_success:
                        return
                    why = f"status {answer.status_code}"
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    why = type(error).__name__  # its text may hold the URL
        log.error(
            "the webhook does not take an alarm",
            host=urlsplit(self._url).hostname, why=why, alarm=event.alarm, state=event.state,
        )  # fmt: skip
