"""Every event on the log: the one schema from which wire, Parquet columns and the reference page derive.

An event is a frozen struct, tagged with its wire name and encoded as MessagePack. Rules that keep old logs readable:
a new field has a default, a field never changes its meaning or type, a tag is never used again. Unknown fields are
skipped, so a newer writer does not break an older reader. A message with an unknown tag becomes a dead letter.

| module | what it holds |
| --- | --- |
| `rollout`, `group`, `policy`, `dead_letter` | the events of one stream each |
| `signal`, `shadow` | events of signals about a run, and of an apprentice beside an outside model, in stream ROLLOUTS |
| `evaluation`, `alarm` | the events of an evaluation and of an alarm, in the stream of `policy` |
| `base` | `Event`: what every event carries |
| `codec` | `encode`, `decode`, the list of all events, the claim check of an event too large for the log |
| `continuation` | an exchange as what follows an earlier one of its trajectory |
| `packing` | token ids, logprobs and masks as packed little-endian arrays |
| `types` | types of fields, with their Parquet columns |
| `schema` | columns of each event, read off the classes |
"""

from pipeline.events.alarm import AlarmChanged
from pipeline.events.base import Event, now_us
from pipeline.events.codec import EVENTS, AnyEvent, ClaimCheck, decode, encode, wire_name
from pipeline.events.continuation import Continuation
from pipeline.events.dead_letter import DeadLettered
from pipeline.events.evaluation import Measure, PolicyEvaluated, TaskResult, Variant, WhatIfAnswered
from pipeline.events.group import (
    GroupAdmitted,
    GroupAhead,
    GroupDiscarded,
    GroupScored,
    Hint,
    JudgeMeasured,
    Member,
    Score,
    Verdict,
)
from pipeline.events.packing import (
    pack_ids,
    pack_logprobs,
    pack_mask,
    pack_seqs,
    unpack_ids,
    unpack_logprobs,
    unpack_mask,
    unpack_seqs,
)
from pipeline.events.policy import (
    STATE_FILE,
    CheckpointPublished,
    DataErased,
    PolicyLoaded,
    PolicyPromoted,
    PolicyRetired,
    PolicyUnloaded,
    standing_decisions,
)
from pipeline.events.rollout import (
    ExchangeRecorded,
    FeedbackTimedOut,
    GroupOpened,
    GroupTimedOut,
    TrainingBatch,
    TrajectoryCompleted,
    TrajectoryOpened,
    group_key,
)
from pipeline.events.shadow import AnswersCompared, ShadowAnswered
from pipeline.events.signal import SignalGiven, TeacherAnswered
from pipeline.events.types import Outcome, Split
