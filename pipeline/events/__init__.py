"""Every event on the log: the one schema from which wire, Parquet columns and docs/events.md derive.

An event is a frozen struct, tagged with its wire name and encoded as MessagePack. Rules that keep old logs readable:
a new field has a default, a field never changes its meaning or type, a tag is never used again. Unknown fields are
skipped, so a newer writer does not break an older reader; an unknown tag goes to the dead letters.

Token ids, logprobs and masks are packed little-endian arrays (`pack_ids`, `unpack_ids`, …), not lists of numbers:
a fifth of the time and under half of the bytes for a 4,096-token trajectory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pipeline.names import subject_token

# -- column types --------------------------------------------------------------------------------------------------

Micros = Annotated[int, msgspec.Meta(extra={"column": "timestamp_us"})]
"""Microseconds since the Unix epoch, UTC."""

TokenIds = Annotated[bytes, msgspec.Meta(extra={"column": "list<int32>"})]
"""Packed little-endian int32, one per token."""

Logprobs = Annotated[bytes, msgspec.Meta(extra={"column": "list<float32>"})]
"""Packed little-endian float32, natural logarithm, one per token."""

TokenMask = Annotated[bytes, msgspec.Meta(extra={"column": "list<uint8>"})]
"""One byte per token: 1 or 0. What an empty mask stands for, the field says."""

StreamSeqs = Annotated[bytes, msgspec.Meta(extra={"column": "list<int64>"})]
"""Packed little-endian int64 stream sequences."""

Json = Annotated[bytes, msgspec.Meta(extra={"column": "json"})]
"""A JSON document, UTF-8, as it went over the wire."""

Outcome = Literal["scored", "no_result", "masked"]
Split = Literal["train", "val"]


def _pack(values: Sequence[int] | Sequence[float] | npt.NDArray[Any], dtype: str) -> bytes:
    return np.asarray(values, dtype=dtype).tobytes()


def pack_ids(ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
    return _pack(ids, "<i4")


def unpack_ids(packed: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(packed, dtype="<i4")


def pack_logprobs(values: Sequence[float] | npt.NDArray[Any]) -> bytes:
    return _pack(values, "<f4")


def unpack_logprobs(packed: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(packed, dtype="<f4")


def pack_mask(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    return _pack(values, "u1")


def unpack_mask(packed: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(packed, dtype="u1")


def pack_seqs(values: Sequence[int] | npt.NDArray[Any]) -> bytes:
    return _pack(values, "<i8")


def unpack_seqs(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, dtype="<i8")


def now_us() -> int:
    """The present as `Micros`."""
    return time.time_ns() // 1000


# -- events --------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every event carries."""

    unique_subject: ClassVar[bool] = False
    """The subject may hold one event only, ever: the broker refuses a second one whatever the deduplication window
    says. Such an event's subject names its identity."""

    project: str
    at: Micros = msgspec.field(default_factory=now_us)
    """When the event was made."""
    v: int = 1
    """Schema version of this class when it was written."""

    def subject(self) -> str:
        raise NotImplementedError(type(self).__name__)  # pragma: no cover - every event below defines it

    def message_id(self) -> str:
        """`Nats-Msg-Id`: the same for every retry of the same fact."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover


class TrajectoryOpened(Event, frozen=True, kw_only=True, tag="rollout.opened"):
    """An agent run began. What it says holds for the whole run, so any gateway replica can rebuild the trajectory."""

    unique_subject = True

    trajectory: str
    model: str
    """Serving name of the policy, `<model>`."""
    group: str
    """Trajectories of one group are attempts at the same task."""
    task: str = ""
    """What the group is about, when the caller names it; free text or an id."""
    attempt: int = 0
    split: Split = "train"
    """`val` trajectories are scored and never trained."""
    group_size: int = 0
    """How many trajectories the caller means to put into the group; 0: the judge's setting decides."""
    key_hash: str = ""
    """SHA-256 of the trajectory's API key; the key itself is never stored."""
    pinned: str = ""
    """Policy version this trajectory must be served by; empty: the promoted one."""
    metadata: Json = b"{}"
    paced_s: float = 0.0
    """Seconds that the group was told to wait (429) before its first trajectory was let in."""
    owner: str = ""
    """Name of the API key that opened the trajectory; only it and operators may touch it. Empty: opened without a key."""
    key_completes: bool = False
    """Whether the trajectory's own key may complete it, and so name its reward."""

    def subject(self) -> str:
        return f"rollout.opened.{subject_token(self.project)}.{subject_token(self.trajectory)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.trajectory}/opened"


class ExchangeRecorded(Event, frozen=True, kw_only=True, tag="rollout.exchange"):
    """One model call of a trajectory and one of its choices: exactly what was sent, sampled and answered."""

    trajectory: str
    seq: int
    """Position of the call in its trajectory, from 0."""
    choice: int = 0
    """Index of the choice when the client asked for n > 1: such a call is n events with one `seq`."""
    model: str
    policy_version: str
    """`<model>@<step>` that sampled; the version routed to when the request began."""
    step: int
    group: str = ""
    request: Json
    """The client's request body."""
    response: Json
    """The chat completion as the client got it (a streamed one put together again)."""
    prompt_ids: TokenIds
    sampled_ids: TokenIds
    """Sampled token ids, as vLLM returned them, including the end-of-turn token where one was sampled."""
    logprobs: Logprobs
    """Of `sampled_ids`, under the distribution they were sampled from."""
    forced: TokenMask = b""
    """1 where a grammar constrained the choice; such tokens are never trained. Empty: no token was constrained."""
    finish_reason: str = ""
    status: Literal["complete", "cancelled", "failed"] = "complete"
    """`cancelled`: the client went away; `failed`: the upstream broke off. What had been sampled by then is recorded."""
    side_call: bool = False
    """A call beside the task (a title, a summary): kept, not trained."""
    endpoint: str = "/v1/chat/completions"
    streamed: bool = False
    request_hash: str = ""
    """SHA-256 of endpoint and canonical body: a retried request is answered from here instead of sampled again."""
    replica: str = ""
    """The vLLM replica that answered."""
    started_at: Micros = 0
    first_token_at: Micros = 0
    """0 where the reply was not streamed."""

    def subject(self) -> str:
        return f"rollout.exchange.{subject_token(self.project)}.{subject_token(self.trajectory)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.trajectory}/{self.seq}.{self.choice}"


class TrajectoryCompleted(Event, frozen=True, kw_only=True, tag="rollout.completed"):
    """An agent run ended, once."""

    unique_subject = True

    trajectory: str
    model: str
    group: str
    task: str = ""
    attempt: int = 0
    split: Split = "train"
    group_size: int = 0
    outcome: Outcome = "scored"
    """`no_result`: infrastructure failed, never becomes a reward; `masked`: kept, never trained."""
    reward: float | None = None
    """What the agent says the run was worth; none: the judge decides."""
    rewards: dict[str, float] = {}
    """Named components, for composed rewards."""
    metrics: dict[str, float] = {}
    metadata: Json = b"{}"
    exchanges: int = 0
    """How many exchange events (choices count singly) belong to the run."""
    first_step: int = 0
    last_step: int = 0
    """Lowest and highest policy step among the exchanges."""
    opened_at: Micros = 0
    inferred: bool = False
    """The gateway inferred where the trajectory began and ended."""

    def subject(self) -> str:
        return ".".join(
            ("rollout.completed", *(subject_token(n) for n in (self.project, self.model, self.trajectory)))
        )

    def message_id(self) -> str:
        return f"{self.project}/{self.trajectory}/completed"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge said of one trajectory."""

    trajectory: str
    score: float
    """0..1."""
    explanation: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one judge call said of one group."""

    judge_model: str
    """Model that judged; `agent` where the agents' own rewards were passed through."""
    rubric_hash: str = ""
    rubric: str = ""
    """The rubric's name."""
    scores: tuple[Score, ...]
    order: tuple[str, ...] = ()
    """Trajectory ids in the order in which the judge saw them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    latency_s: float = 0.0
    attempts: int = 1
    """Calls made until the reply could be read."""
    left_out: int = 0
    """Bytes of the trajectories that did not fit into the prompt (`judge.context_tokens`), so that the judge did not see them."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory's place in a scored group."""

    trajectory: str
    reward: float
    """The group's final reward of the trajectory, after composition."""
    outcome: Outcome = "scored"
    split: Split = "train"
    components: dict[str, float] = {}
    """Every reward that went into `reward`, by name."""
    exchanges: int = 0
    first_step: int = 0
    last_step: int = 0
    completed_seq: int = 0
    """Stream sequence of the member's `rollout.completed`."""


class GroupScored(Event, frozen=True, kw_only=True, tag="group.scored"):
    """The trajectories of one task, with their rewards: the unit of GRPO. One per group and judge configuration."""

    unique_subject = True

    group: str
    model: str
    task: str = ""
    judge: str
    """Hash of the judge configuration that scored it."""
    members: tuple[Member, ...]
    verdicts: tuple[Verdict, ...] = ()
    branch: str = "main"
    """The line of history it belongs to; replays live on branches of their own."""
    origin: str = ""
    """For a replayed group: `<branch>/<stream sequence>` of what it was made from."""
    offline: bool = False
    """True where the trajectories were not sampled for this training run."""
    closed_by: Literal["size", "timeout", "replay"] = "size"
    split: Split = "train"
    """Trajectories of different splits under one group id are groups of their own."""

    def subject(self) -> str:
        names = [self.project, self.model, self.group, self.judge, self.branch]
        if self.split != "train":
            names.append(self.split)
        return ".".join(("group.scored", *(subject_token(n) for n in names)))

    def message_id(self) -> str:
        ended = "scored" if self.split == "train" else f"scored/{self.split}"
        return f"{self.project}/{self.model}/{self.branch}/{self.group}/{self.judge}/{ended}"


class GroupDiscarded(Event, frozen=True, kw_only=True, tag="group.discarded"):
    """Experience that will not train, and why: nothing is dropped in silence."""

    group: str
    model: str
    trajectories: tuple[str, ...]
    reason: Literal[
        "too_small",
        "late",
        "unscored",
        "no_variance",
        "stale",
        "history_gone",
        "over_budget",
        "validation",
        "repeated",
        "too_large",
    ]
    """`too_large`: a sequence of these trajectories does not fit into the trainer's memory even alone. The rest of the group was
    trained, in `version`."""
    by: str
    """The service that decided."""
    detail: str = ""
    version: str = ""
    """Policy version at which it was decided, where that matters."""
    duration_s: float = 0.0
    """How long the longest of the trajectories took, to see whether long tasks starve."""
    branch: str = "main"
    split: Split = "train"

    def subject(self) -> str:
        names = (self.project, self.model, self.group, self.branch)
        return ".".join(("group.discarded", *(subject_token(n) for n in names)))

    def message_id(self) -> str:
        first = self.trajectories[0] if self.trajectories else ""
        return f"{self.project}/{self.model}/{self.branch}/{self.group}/{first}/{self.reason}/{self.by}"


class JudgeMeasured(Event, frozen=True, kw_only=True, tag="group.measured"):
    """What a judge found out about itself: its bias and agreement with itself, or with groups of known rewards."""

    kind: Literal["groups", "anchors"]
    """`groups`: over all groups that this judge process scored so far; `anchors`: one run over the anchor groups."""
    judge: str
    """Hash of the judge configuration, as in `group.scored`."""
    model: str
    """The judge model as configured."""
    ruler: str
    """Name of the reward whose judge it is; `default` where rewards are not composed."""
    rubric: str = ""
    rubric_hash: str = ""
    groups: int = 0
    """How many groups it rests on."""
    failed: int = 0
    """Judgings (or anchor groups) that gave no scores."""
    calls: int = 0
    asked_again: int = 0
    """Calls that were needed because a reply could not be read."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    self_agreement: float | None = None
    """Share of pairs that two judgings of a group put into the same order."""
    position_bias: float | None = None
    """What the first place in the list is worth over the others, in points of score, before it is taken out."""
    kendall_tau: float | None = None
    """Agreement with the known rewards of the anchors."""
    pairwise_accuracy: float | None = None
    sign_flips: float | None = None
    """Share of anchor trajectories whose advantage has the wrong sign."""
    alarm: bool = False
    """The judge has left the bound `judge.anchor_min_tau`."""

    def subject(self) -> str:
        names = (self.project, self.ruler, self.kind)
        return ".".join(("group.measured", *(subject_token(n) for n in names)))

    def message_id(self) -> str:
        return f"{self.project}/{self.ruler}/measured/{self.kind}/{self.judge}/{self.at}"


def checkpoint_subject(project: str, model: str, step: str = "*", branch: str = "main") -> str:
    """Of a checkpoint, or (`*`) of every checkpoint of a model on a branch."""
    names = [project, model, *([] if step == "*" else [step])]
    tokens = [subject_token(n) for n in names] + (["*"] if step == "*" else [])
    return ".".join(("policy.checkpoint", *tokens, *([] if branch == "main" else [subject_token(branch)])))


class CheckpointPublished(Event, frozen=True, kw_only=True, tag="policy.checkpoint"):
    """One optimizer step, committed: its adapter is in the object store and its inputs are named."""

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

    def subject(self) -> str:
        return checkpoint_subject(self.project, self.model, str(self.step), self.branch)

    def message_id(self) -> str:
        other = "" if self.branch == "main" else f"/{self.branch}"
        return f"{self.project}/{self.version}{other}"


class PolicyLoaded(Event, frozen=True, kw_only=True, tag="policy.loaded"):
    """A vLLM replica serves a version: downloaded, checked, loaded and probed."""

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

    def subject(self) -> str:
        return f"policy.loaded.{subject_token(self.project)}.{subject_token(self.model)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/loaded/{self.replica}/{self.incarnation}"


class PolicyUnloaded(Event, frozen=True, kw_only=True, tag="policy.unloaded"):
    """A vLLM replica no longer holds a version: its gateway unloaded it to make room."""

    model: str
    version: str
    replica: str
    incarnation: str = ""
    """Which life of the replica, as in `policy.loaded`."""

    def subject(self) -> str:
        return f"policy.unloaded.{subject_token(self.project)}.{subject_token(self.model)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/unloaded/{self.replica}/{self.incarnation}/{self.at}"


class PolicyRetired(Event, frozen=True, kw_only=True, tag="policy.retired"):
    """Retention will remove a version's adapter: no trajectory may be pinned to it and no decision may name it from now on."""

    model: str
    version: str
    branch: str = "main"
    withdrawn: bool = False
    """True: something came to need the version before it was removed; it stays."""

    def subject(self) -> str:
        return f"policy.retired.{subject_token(self.project)}.{subject_token(self.model)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.version}/retired/{self.branch}/{self.at}"


class PolicyPromoted(Event, frozen=True, kw_only=True, tag="policy.promoted"):
    """Which version(s) new trajectories of a model are routed to."""

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

    def subject(self) -> str:
        return f"policy.promoted.{subject_token(self.project)}.{subject_token(self.model)}"

    def message_id(self) -> str:
        return f"{self.project}/{self.model}/promoted/{self.request}"


class DeadLettered(Event, frozen=True, kw_only=True, tag="dead.letter"):
    """A message that no one could use, with the reason; never dropped, never blocking."""

    stream: str
    stream_seq: int
    original_subject: str
    consumer: str
    reason: str
    detail: str = ""
    deliveries: int = 1
    payload: bytes = b""
    headers: dict[str, str] = {}
    stream_at: Micros = 0
    """Stream time of the message: after a power cut another message may lie under `stream_seq`. 0 in letters from before it was
    recorded."""

    def subject(self) -> str:
        return f"dead.{self.stream}.{subject_token(self.consumer)}"

    def message_id(self) -> str:
        return f"dead/{self.stream}/{self.stream_seq}-{self.stream_at}/{self.consumer}"


class ClaimCheck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="claim"):
    """Stands in the log for an event larger than the server's payload limit; the event lies in the object store."""

    object: str
    sha256: str
    size: int
    event: str
    """Tag of the event that was checked in; empty: unknown bytes."""
    bucket: str = "CLAIMS"
    """Where the object lies."""


AnyEvent = (
    TrajectoryOpened
    | ExchangeRecorded
    | TrajectoryCompleted
    | GroupScored
    | GroupDiscarded
    | JudgeMeasured
    | CheckpointPublished
    | PolicyLoaded
    | PolicyUnloaded
    | PolicyRetired
    | PolicyPromoted
    | DeadLettered
)

EVENTS: tuple[type[Event], ...] = AnyEvent.__args__
"""Every event class, in the order of a trajectory's life."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyEvent | ClaimCheck)


def wire_name(event: type[Event] | Event) -> str:
    """The tag of an event class, such as `rollout.exchange`."""
    cls = event if isinstance(event, type) else type(event)
    return str(cls.__struct_config__.tag)


def encode(event: Event | ClaimCheck) -> bytes:
    return _encoder.encode(event)


def decode(payload: bytes) -> AnyEvent | ClaimCheck:
    """Raises `msgspec.DecodeError` (or its `ValidationError`) on what is no event of a known kind, and on an event whose packed
    arrays could not be unpacked, so that no reader has to expect one."""
    event = _decoder.decode(payload)
    kind = type(event)
    if kind is ExchangeRecorded:
        # Logprobs and masks may be of another length than the tokens: the trainer then makes no use of them.
        if (len(event.prompt_ids) | len(event.sampled_ids) | len(event.logprobs)) % 4:
            _check_packed(event, ("prompt_ids", "sampled_ids", "logprobs"), 4)
    elif kind is CheckpointPublished:
        _check_packed(event, ("group_seqs", "group_times"), 8)
        seqs, times = len(event.group_seqs) // 8, len(event.group_times) // 8
        if seqs not in (0, len(event.groups)) or times not in (0, seqs):
            raise msgspec.ValidationError(
                f"{len(event.groups)} groups with {seqs} sequences and {times} stream times: the numbers must be equal - at "
                "`$.group_seqs`"
            )
    checked: AnyEvent | ClaimCheck = event
    return checked


def _check_packed(event: Event, fields: tuple[str, ...], size: int) -> None:
    for name in fields:
        if (length := len(getattr(event, name))) % size:
            raise msgspec.ValidationError(
                f"a packed array of {length} bytes, which is no multiple of {size} - at `$.{name}`"
            )
