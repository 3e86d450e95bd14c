"""The gateway's API for runs that are made of recorded calls.

In ART a program collects trajectories first, and says then what belongs together and with which reward. The gateway has
recorded the calls as they were made. So a finished group names its calls (`Reference`), and the gateway makes runs of
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict
from urllib.parse import quote

from journeywork.art.captured import Reference
from journeywork.client import AsyncJourneywork

_COMPLETE_S = 600.0
"""Seconds that the gateway may take to copy the calls of a group."""


class Batch(TypedDict):
    """Groups that are trained in one step."""

    id: str
    groups: list[str]
    settings: dict[str, Any]


class Member(TypedDict):
    """A trajectory of a group, with its result."""

    id: str
    exchanges: list[Reference]
    reward: float
    metrics: dict[str, float]
    metadata: dict[str, Any]
    batch: NotRequired[Batch]
    demonstration: NotRequired[dict[str, Any]]
    """Conversation that makes up the trajectory, in place of `exchanges`."""


class Gateway(AsyncJourneywork):
    """A client of one gateway."""

    async def complete_group(
        self, group: str, model: str, members: Sequence[Member], *, task: str = "", split: str = "train"
    ) -> None:
        """Make the trajectories of a group from recorded calls, and complete them with the results of `members`.

        `group` is the name of the group on the log, `model` the model that played it, `task` the description of its
        task. `split` is `train` or `val`. Completing a group again with the same members has no effect. The gateway
        copies every call before it answers, so this request may wait `_COMPLETE_S`; the client's other requests keep
        their timeout. Raises `GatewayUnavailableError` and `JourneyworkError`."""
        body = {"model": model, "task": task, "split": split, "trajectories": list(members)}
        await self._request("POST", f"/v1/groups/{quote(group, safe='')}/complete", body, timeout_s=_COMPLETE_S)

    async def policy(self, model: str) -> dict[str, Any]:
        """Return what the gateway serves for a model. Raises `LookupError` if it does not serve the model."""
        served = await self.policies()
        for policy in served:
            if policy["model"] == model:
                return policy
        names = ", ".join(repr(policy["model"]) for policy in served) or "none"
        raise LookupError(
            f"the gateway at {self.url} serves no model {model!r}, but: {names}. Give the `TrainableModel` one of "
            "these names, or start an installation with `models.0.name` set to its name."
        )
