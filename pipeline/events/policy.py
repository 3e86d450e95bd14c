"""Events of policy versions, in stream POLICY."""

from __future__ import annotations

from typing import Literal

from pipeline.events.base import Event
from pipeline.events.types import Micros, StreamSeqs


class CheckpointPublished(Event, frozen=True, kw_only=True, tag="policy.checkpoint"):
    """One optimizer step, committed: its adapter is in the object store and its inputs are named."""

    subject_fields = ("project", "model", "step")
    last_subject_field = ("branch", "main")
    unique_subject = True

    model: str
    step: int
    version: str
    parent: str
    """The version it was trained from."""
    batch_id: str
    """Hash of parent, group ids and training config."""
    groups: tuple[str, ...]
    group_seqs: StreamSeqs = b""
    """Stream sequences of the consumed `group.scored` events, in the order of `groups`."""
    group_times: StreamSeqs = b""
    """Stream times of these events, in microseconds: a sequence alone may stand for another event after a power cut. Empty in
    checkpoints from before it was recorded."""
    config_hash: str
    base_model: str = ""
    adapter: str
    """Object name in the adapter bucket: one uncompressed tar of the PEFT adapter folder."""
    adapter_sha256: str
    adapter_bytes: int
    files: dict[str, str] = {}
    """File name to SHA-256, of the adapter and of the training state."""
    metrics: dict[str, float] = {}
    started_at: Micros = 0
    branch: str = "main"
    """The line of history it was trained from; versions of different branches are different, though named alike."""
    signature: bytes = b""
    """The trainer's Ed25519 signature of every other field; empty if the trainer has no signing key."""
    signer: str = ""
    """Public nkey of who signed."""

    def message_id(self) -> str:
        other = "" if self.branch == "main" else f"/{self.branch}"
        return f"{self.project}/{self.version}{other}"


class PolicyLoaded(Event, frozen=True, kw_only=True, tag="policy.loaded"):
    """A vLLM replica serves a version: downloaded, checked, loaded and probed."""

    subject_fields = ("project", "model")

    model: str
    step: int
    version: str
    replica: str
    gateway: str = ""
    adapter_sha256: str = ""
    probe_delta: float = 0.0
    """Largest absolute difference of a probe's logprobs against the base model; 0 would mean a silent no-op."""
    load_s: float = 0.0
    started_at: Micros = 0
    incarnation: str = ""
    """Tells one life of the replica from the next: a restarted server loads again."""

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/loaded/{self.replica}/{self.incarnation}"


class PolicyUnloaded(Event, frozen=True, kw_only=True, tag="policy.unloaded"):
    """A vLLM replica no longer holds a version: its gateway unloaded it to make room."""

    subject_fields = ("project", "model")

    model: str
    version: str
    replica: str
    incarnation: str = ""
    """Which life of the replica, as in `policy.loaded`."""

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/unloaded/{self.replica}/{self.incarnation}/{self.at}"


class PolicyRetired(Event, frozen=True, kw_only=True, tag="policy.retired"):
    """Retention will remove a version's adapter: no trajectory may be pinned to it and no decision may name it from now on."""

    subject_fields = ("project", "model")

    model: str
    version: str
    branch: str = "main"
    withdrawn: bool = False
    """True: something came to need the version before it was removed; it stays."""

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/retired/{self.branch}/{self.at}"


class PolicyPromoted(Event, frozen=True, kw_only=True, tag="policy.promoted"):
    """Which version(s) new trajectories of a model are routed to."""

    subject_fields = ("project", "model")

    model: str
    version: str
    """Empty: follow the newest loaded version."""
    action: Literal["promote", "rollback", "pin", "split", "follow"] = "promote"
    other: str = ""
    """The second version of a percentage split."""
    percent: float = 100.0
    """Share of trajectories that goes to `version`; the rest goes to `other`."""
    by: str = ""
    reason: str = ""
    request: str = ""
    """Caller's idempotency id, or a fresh one."""

    def message_id(self) -> str:
        return f"{self.project}/{self.model}/promoted/{self.request}"
