"""Which policy version a name stands for, so that an evaluation plays with one version from its beginning to its end.

`support` is a model, `support@12` its version after step 12, `support@0` or `support@base` the base model. The
gateway's `policies` says which version each model's name stands for, its `models` which names a call may use."""

from __future__ import annotations

from collections.abc import Sequence

from journeywork.gathering import Client
from journeywork.trajectory import parse_policy

_SHOWN = 12
"""Versions that an error message names."""


async def resolve(client: Client, policies: Sequence[str]) -> list[str]:
    """Return the version of each policy: the one that it names (`support@12`, `support@base`), or the one that the
    model's name stands for now; empty for an outside model, which has none.

    Raises `ValueError` for a text that is no policy, and for a model or a version that the gateway does not have; the
    message says which it has. Raises `JourneyworkError` if the gateway refuses to tell."""
    parsed = [parse_policy(policy) for policy in policies]
    served = {policy["model"]: str(policy["version"]) for policy in await client.policies()}
    if any(version or model not in served for model, version in parsed):
        # `policies` tells neither old versions nor branches nor outside models: `models` does.
        known = await client.models()
        for model, version in parsed:
            # An outside model (a provider's): a name that calls may use and that has no versions.
            if model not in served and not version and model in known and not _versions(model, known):
                served[model] = ""
            if model not in served:
                # A branch of the history (`support+stricter`), about which there are no decisions: its name stands for
                # its newest version.
                if not (versions := _versions(model, known)):
                    raise ValueError(f"the gateway has no model {model!r}; it has: {', '.join(served) or 'none'}")
                served[model] = versions[-1]
            if version and version not in known:
                raise ValueError(f"the gateway has no version {version!r}; it has: {_versions_text(model, known)}")
    return [version or served[model] for model, version in parsed]


def _versions(model: str, known: Sequence[str]) -> list[str]:
    """Return the versions of a model among the names `known`, the oldest first."""
    versions = [name for name in known if name.rpartition("@")[0] == model]
    return sorted(versions, key=lambda name: int(name.rpartition("@")[2]))


def _versions_text(model: str, known: Sequence[str]) -> str:
    """Return the versions of a model as a text: all, or the first one and the latest."""
    versions = _versions(model, known)
    if len(versions) > _SHOWN:
        versions = [versions[0], "…", *versions[1 - _SHOWN :]]
    return ", ".join(versions)
