"""Events of policy versions, in stream POLICY.

A *version*, such as `support@12`, is the adapter after training step 12 of the model `support`; `support@0` is the base
model. Its files are in an object store, and the event `policy.checkpoint` names them with their hashes. Other events
say which server has loaded a version, which one is served by decision, and what an evaluation found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

from pipeline.events.base import Event
from pipeline.events.types import Micros, StreamSeqs

STATE_FILE = "state.pt"
"""Name of a checkpoint's training state among its files."""


class CheckpointPublished(Event, frozen=True, kw_only=True, tag="policy.checkpoint"):
    """A committed optimizer step: its adapter is in the object store, and the event names its inputs."""

    subject_fields = ("project", "model", "step")
    last_subject_field = ("branch", "main")
    unique_subject = True

    model: str
    step: int
    version: str
    parent: str
    """Version that it was trained from."""
    batch_id: str
    """Hash of parent, group ids and training config."""
    groups: tuple[str, ...]
    group_seqs: StreamSeqs = b""
    """Stream sequences of the consumed `group.scored` events, in the order of `groups`."""
    group_times: StreamSeqs = b""
    """Stream times of these events, in microseconds: after a power cut, another event may have the same sequence."""
    config_hash: str
    base_model: str = ""
    base_digest: str = ""
    """Hash of the base model's configuration and of some of its weights. Training continues only on a base model with
    the same hash."""
    adapter: str
    """Object name in the adapter bucket: one uncompressed tar of the PEFT adapter folder."""
    adapter_sha256: str
    adapter_bytes: int
    files: dict[str, str] = {}
    """File name to SHA-256, of the adapter and of the training state."""
    source: str = ""
    """Where the weights come from, if not from a step over groups: `<lake>#<project>/<branch>/<version>`, a PEFT
    folder, or a data set as `<format>:sha256:<hash of its split train>`."""
    metrics: dict[str, float] = {}
    started_at: Micros = 0
    branch: str = "main"
    """Branch of the log that it was trained from. Versions of different branches may have the same name."""
    signature: bytes = b""
    """The trainer's Ed25519 signature of every other field; empty if the trainer has no signing key."""
    signer: str = ""
    """Public nkey of the signer."""

    @property
    def state(self) -> str:
        """Object name of the training state (optimizer, unrounded weights) in the adapter bucket; empty if there is
        none. It is kept for the newest versions only; the store copies it to the lake."""
        digest = self.files.get(STATE_FILE, "")
        return f"{self.adapter}/{digest[:16]}" if digest else ""


class PolicyLoaded(Event, frozen=True, kw_only=True, tag="policy.loaded"):
    """An inference server has loaded a version: its sampler agent downloaded, checked, loaded and probed it. Gateways
    send calls for the version to this server from now on."""

    subject_fields = ("project", "model")
    # A version may be loaded, unloaded and loaded again within the stream's duplicate window.
    message_id_format = "{0.project}/{0.version}/loaded/{0.replica}/{0.server_start}/{0.started_at}"

    model: str
    step: int
    version: str
    replica: str
    adapter_sha256: str = ""
    probe_delta: float = 0.0
    """Largest absolute difference of a probe's logprobs against the base model; 0: the adapter has no effect."""
    load_s: float = 0.0
    started_at: Micros = 0
    server_start: str = ""
    """Identity of the server process: a restarted server loads its adapters again."""


class PolicyUnloaded(Event, frozen=True, kw_only=True, tag="policy.unloaded"):
    """An inference server is about to unload a version, to make room. Gateways send it no further call for the version,
    and its sampler agent unloads it when the last call has ended."""

    subject_fields = ("project", "model")
    message_id_format = "{0.project}/{0.version}/unloaded/{0.replica}/{0.server_start}/{0.at}"

    model: str
    version: str
    replica: str
    server_start: str = ""
    """Identity of the server process, as in `policy.loaded`."""


class PolicyRetired(Event, frozen=True, kw_only=True, tag="policy.retired"):
    """Retention will remove a version's adapter: no trajectory may be pinned to it and no decision may name it from
    now on."""

    subject_fields = ("project", "model")
    message_id_format = "{0.project}/{0.version}/retired/{0.branch}/{0.at}"

    model: str
    version: str
    branch: str = "main"
    withdrawn: bool = False
    """True: the version is no longer retired, because something needed it before its adapter was removed."""


class DataErased(Event, frozen=True, kw_only=True, tag="policy.erased"):
    """The receipt of an erasure (`journeywork erase`): counts of what was deleted, without the person's name."""

    subject_fields = ("project", "erasure")
    message_id_format = "{0.project}/erased/{0.erasure}"

    erasure: str
    """Id of the erasure."""
    digest: str
    """HMAC-SHA256 of the person's name, under a key that only the run directory has (`keys/erasure.key`)."""
    runs: int = 0
    left: int = 0
    """The person's unfinished runs, which were not deleted (`--finished`)."""
    messages: dict[str, int] = {}
    """By stream, the messages that were overwritten on the log."""
    objects: int = 0
    """Events among them that were kept in the object store, because they exceed the payload limit."""
    rows: dict[str, int] = {}
    """By table, the rows of the lake that were deleted; for scored groups, the rows whose texts were deleted."""
    folders: int = 0
    """Data sets in the run directory that were deleted."""
    learned: tuple[str, ...] = ()
    """Checkpoints that were trained on the runs, and all that descend from them."""
    clean: dict[str, str] = {}
    """By model, the newest version of branch `main` that is none of `learned`."""
    by: str = ""


class PolicyPromoted(Event, frozen=True, kw_only=True, tag="policy.promoted"):
    """A decision: the version, or two versions, to which new trajectories of a model are routed. A `rollback` names the
    versions of the decision before the one that it reverts.

    `model` may be an outside model that has an apprentice. Then `outside:<model>` stands for itself among the versions,
    the others are the apprentice's, and `follow` routes to the apprentice's name."""

    subject_fields = ("project", "model")
    message_id_format = "{0.project}/{0.model}/promoted/{0.request}"

    model: str
    version: str
    """Empty: follow the newest loaded version."""
    action: Literal["promote", "rollback", "pin", "split", "follow"] = "promote"
    """`pin`: a `promote`, in logs from before 0.2."""
    other: str = ""
    """The second version of a percentage split."""
    percent: float = 100.0
    """Share of trajectories that goes to `version`; the rest goes to `other`."""
    by: str = ""
    reason: str = ""
    request: str = ""
    """Caller's idempotency id, or a fresh one."""
    min_logprob: float | None = None
    """About an outside model: answers of its apprentice with a lower mean logprob are replaced by the outside model's.
    `null`: none is."""
    prompt: str = ""
    """System prompt that `version` gets in place of the agent's, while the decision is in force. Empty: the agent's
    own."""
    replaces: str = ""
    """The agent's system prompt in whose place it is put. Another one stays."""
    evidence: str = ""
    """JSON, if `journeywork decide` made the decision: its plan, the runs, the numbers and the verdict
    (docs/operations.md)."""

    @property
    def prompt_id(self) -> str:
        """How `prompt` is named: the beginning of its SHA-256; empty without one."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:12] if self.prompt else ""


def standing_decisions(decisions: Iterable[PolicyPromoted]) -> list[PolicyPromoted]:
    """Return the decisions about a model that were not taken back, oldest first: the last one is in force. Each
    `rollback` takes back the last decision that stood before it. `decisions`: all of the model, oldest first."""
    standing: list[PolicyPromoted] = []
    for decision in decisions:
        if decision.action != "rollback":
            standing.append(decision)
        elif standing:
            standing.pop()
    return standing
