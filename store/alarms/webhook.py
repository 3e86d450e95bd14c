"""Alarms to a webhook: one JSON document each, repeated while the receiver does not take it. Nothing waits for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx

from pipeline.backoff import Backoff
from pipeline.config import Config, ConfigError
from pipeline.config.secrets import REFERENCE
from pipeline.events import AlarmChanged
from pipeline.telemetry.logs import get_logger
from store.alarms.table import BY_NAME

log = get_logger("store.alarms.webhook")

_WAITING = 100
"""Changes that wait at most."""
_TIMEOUT_S = 10.0
_FIRST_S, _LONGEST_S = 0.5, 30.0


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


def message(config: Config, event: AlarmChanged) -> dict[str, str | float]:
    """What is posted for a change: names and figures, no content of runs, no key and no path."""
    alarm = BY_NAME.get(event.alarm)
    title = alarm.title if alarm else event.alarm
    subject = f"{title} of {event.model}" if event.model else title
    state = "raised" if event.state == "raised" else "over"
    return {
        "text": f"{state}: {subject}: {event.detail}",
        "id": event.message_id(),
        "state": event.state,
        "alarm": event.alarm,
        "title": title,
        "project": event.project,
        "run": Path(config.run_dir).name,
        "model": event.model,
        "about": event.about,
        "value": event.value,
        "threshold": event.threshold,
        "detail": event.detail,
        "action": alarm.action if alarm else "",
        "since": event.since / 1e6,
        "at": event.at / 1e6,
    }


class Webhook:
    """Posts changes one after the other. `send` never waits; `run` does the work."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError`."""
        self._config, self._url = config, webhook_url(config)
        self._into, self._waiting = anyio.create_memory_object_stream[AlarmChanged](_WAITING)

    def send(self, event: AlarmChanged) -> None:
        """Post `event` soon."""
        try:
            if self._url:
                self._into.send_nowait(event)
        except anyio.WouldBlock:
            log.warning("a change of an alarm is not posted: too many wait", alarm=event.alarm)

    async def run(self) -> None:
        """Post what `send` gives until cancelled."""
        with self._into, self._waiting:
            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                async for event in self._waiting:
                    await self._post(client, event)

    async def _post(self, client: httpx.AsyncClient, event: AlarmChanged) -> None:
        """Post one change; give up after `alarms.webhook_retry_s`, or at once where repeating can't help."""
        backoff = Backoff(_FIRST_S, _LONGEST_S)
        until = time.monotonic() + self._config.alarms.webhook_retry_s
        while True:
            try:
                answer = await client.post(self._url, json=message(self._config, event))
                if answer.is_success:
                    return
                why, lasting = f"status {answer.status_code}", answer.status_code in (400, 401, 403, 404, 410)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why, lasting = type(error).__name__, False  # its text may hold the URL
            if lasting or time.monotonic() >= until:
                log.error(
                    "the webhook does not take an alarm",
                    host=urlsplit(self._url).hostname, why=why, alarm=event.alarm, state=event.state,
                )  # fmt: skip
                return
            await backoff.wait()
