"""Feedback: what a client says about a run or about one of its calls becomes a "signal", an event that judge and
trainer use as the settings say, whenever it comes.

`on_trajectory` and `on_answers` are the handlers of the two routes. They read the body into one `_Target` for each run
that it is about, check all of them, and then record the signals. Whose feedback counts for what is decided elsewhere;
`_use_of` tells the sender in advance. All functions raise `ApiError`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from pipeline import crash
from pipeline.chat.conversations import text_of
from pipeline.config import Config
from pipeline.events import GroupDiscarded, GroupScored, SignalGiven, TrajectoryOpened, group_key
from pipeline.events.signal import OWN_REWARD
from pipeline.log.subjects import keys_of, stream_of, subject_filter
from pipeline.names import check_name, is_outside, name_of_token, new_id, outside_model
from rollout_gateway.access.api_keys import Access
from rollout_gateway.api.gateway import ControlRequest, Gateway
from rollout_gateway.api.schemas import LONGEST_TEXT, AnswerFeedback, Feedback, RunFeedback
from rollout_gateway.capture.answer_ids import trajectory_of
from rollout_gateway.capture.identity import check_own_trajectory
from rollout_gateway.capture.trajectory import size_of
from rollout_gateway.http.errors import ApiError, check_repeated_text, invalid_body, unknown_trajectory
from rollout_gateway.serving.idempotency import publish_once, refuse_different

_LONG_TEXT = 4096
"""Characters. If a text is longer, all texts of its key on the run are read and counted."""
_MAX_TEXT = 4 * 1024 * 1024
"""Characters of one key's texts on one run, in requests that are not simultaneous: whatever takes the run reads all of
them."""
_RANKING_BYTES = 1024 * 1024
"""Bytes of text that a ranking may record: each of its runs gets the text."""
_RUN_ADVICE = "Feedback on a run by its id goes to POST /v1/trajectories/<id>/feedback."


class _Grade(NamedTuple):
    """What the feedback says, as three fields of a signal."""

    kind: Literal["number", "text", "correction"]
    value: float | None
    text: str


@dataclass(frozen=True)
class _Target:
    """One run, or one call of it, that feedback is about, with what it says."""

    trajectory: str
    call: int | str
    """Number (`seq`) of a call, or the id of its answer. -1: the whole run."""
    grade: _Grade
    of_run: bool = False
    """Whether the feedback is about the whole run that `call` belongs to."""


async def on_trajectory(request: ControlRequest) -> dict[str, Any]:
    """`POST /v1/trajectories/{trajectory}/feedback`: on a run, or on one call of it."""
    body = request.read(RunFeedback)
    grade = _grade(body, request.gateway.config.gateway.max_reward)
    (trajectory,) = request.values
    return await _record_signals(request, body, [_Target(trajectory, body.call, grade)])


async def on_answers(request: ControlRequest) -> dict[str, Any]:
    """`POST /v1/feedback`: on the call that an answer belongs to, or a ranking of runs and answers."""
    try:
        body = request.read(AnswerFeedback)
    except ApiError as error:
        if error.param != "trajectory":
            raise
        # Only the route for one run has this field: who sends it here is told where to send it.
        raise ApiError(error.status, error.code, f"{error} {_RUN_ADVICE}", param="trajectory") from error
    if bool(body.answer) == bool(body.ranking):
        message = "Send either `answer`, the id of an answer, or `ranking`, ids of runs or answers, best first."
        raise invalid_body(f"{message} {_RUN_ADVICE}", "answer")
    if body.answer:
        trajectory = trajectory_of(body.answer)
        if trajectory is None:
            raise _unknown_answer(body.answer)
        grade = _grade(body, request.gateway.config.gateway.max_reward)
        return await _record_signals(
            request, body, [_Target(trajectory, body.answer, grade, of_run=body.about == "run")]
        )
    return await _record_signals(request, body, _targets_of_ranking(body))


def _grade(body: Feedback, limit: float) -> _Grade:
    """Return the grade that a body gives: a number (of a `thumb`, 1 or -1; of a `scale`, mapped to 0..1), a text or a
    correction. `limit`: `gateway.max_reward`. Raises a 400 `ApiError` unless it gives exactly one, within its
    bounds."""
    gradings = (body.value is not None, body.thumb is not None, bool(body.correction), bool(body.corrected_by))
    if sum(gradings) > 1 or not (any(gradings) or body.text) or (any(gradings[2:]) and body.text):
        message = (
            "Say one thing: `value`, `thumb`, `ranking`, `correction`, `corrected_by` or `text`. `text` may comment on "
            "a value or a thumb. Send the rest as further feedback, with a `key` of its own."
        )
        raise invalid_body(message)
    if body.scale is not None and body.value is None:
        raise invalid_body("`scale` needs a `value`.", "scale")
    if body.correction or body.corrected_by:
        return _Grade("correction", None, body.correction)
    if body.thumb is not None:
        return _Grade("number", 1.0 if body.thumb == "up" else -1.0, body.text)
    if body.value is None:
        return _Grade("text", None, body.text)
    low, high = body.scale or (-limit, limit)
    if not low < high:
        raise invalid_body(f"`scale` is [{low:g}, {high:g}]: send the lowest number first, then the highest.", "scale")
    if not low <= body.value <= high:
        what = "`scale`" if body.scale else "gateway.max_reward"
        message = f"`value` is {body.value:g}. It must be from {low:g} to {high:g} ({what})."
        raise ApiError(400, "reward_out_of_range", message, param="value")
    value = (body.value - low) / (high - low) if body.scale else body.value
    return _Grade("number", value, body.text)


def _targets_of_ranking(body: AnswerFeedback) -> list[_Target]:
    """Return the runs and answers of a ranking, each with a number as its grade, in equal steps from 1 for the first to
    0 for the last. Raises a 400 `ApiError` for an invalid ranking."""
    others = (body.value, body.scale, body.thumb, body.correction or None, body.corrected_by or None)
    if any(other is not None for other in others):
        message = "A `ranking` says what it thinks of each run. Leave the other fields out, except `text`."
        raise invalid_body(message, "ranking")
    last = len(body.ranking) - 1
    if not last:
        raise invalid_body("A `ranking` has two members or more.", "ranking")
    check_repeated_text("text", body.text, len(body.ranking), _RANKING_BYTES)
    targets = []
    for place, name in enumerate(body.ranking):
        run, grade = trajectory_of(name), _Grade("number", 1 - place / last, body.text)
        targets.append(_Target(run, name, grade, of_run=body.about == "run") if run else _Target(name, -1, grade))
    run, times = Counter(target.trajectory for target in targets).most_common(1)[0]
    if times > 1:
        raise invalid_body(f"`ranking` names the run {run!r} more than once: name one answer of each run.", "ranking")
    return targets


async def _record_signals(request: ControlRequest, body: Feedback, targets: list[_Target]) -> dict[str, Any]:
    """Record a signal for each target: all of them or, if one is refused, none. Returns the answer to the request."""
    gateway = request.gateway
    key = body.key or new_id("f")
    check_name(body.name)
    await gateway.registry.log.check_end()
    request.charge_runs(len(targets))
    checked = [await _checked_signal(request, body, key, target) for target in targets]
    if body.key and len(targets) > 1:  # else `publish_once` refuses it, before anything is recorded
        for event, _ in checked:
            recorded = await gateway.broker.read_last(SignalGiven, **keys_of(event))
            if recorded is not None:
                refuse_different(event, recorded.event, "key", key)
    signals = []
    for event, answer in checked:
        ack = await publish_once(gateway.broker, event, "key", key)
        signals.append({**answer, "repeated": ack.duplicate})
        crash.point("gateway.before_answer")
    return {"key": key, "name": body.name, "signals": signals}


async def _checked_signal(
    request: ControlRequest, body: Feedback, key: str, target: _Target
) -> tuple[SignalGiven, dict[str, Any]]:
    """Check what is to be recorded about a target. Returns its signal, masked, and the fields that the sender gets
    about it. `key`: the idempotency id of the feedback. Raises `ApiError`."""
    gateway, access = request.gateway, request.access
    opened = await _opening_to_grade(gateway, target.trajectory, access)
    grader = opened.owner if access.trajectory else access.owner
    grade, source = target.grade._asdict(), body.source
    if source == "healing" or is_outside(source):
        raise invalid_body(f"`source` {source!r} is the installation's own.", "source")
    if body.corrected_by:
        grade["text"], source = await _last_answer_of(request, body.corrected_by, opened.owner)
    call = await _call_number(request, opened, target.call)
    event = SignalGiven(
        project=gateway.project,
        # The `:` of a key's name is escaped, so no two names make the same id.
        signal=check_name(f"{quote(grader, safe='')}:{key}"),
        trajectory=opened.trajectory,
        model=opened.model,
        group=group_key(opened.group, opened.trajectory),
        split=opened.split,
        call=-1 if target.of_run else call,
        name=body.name,
        **grade,
        by=grader,
        source=source,
        copied_from=body.corrected_by,
    )
    event = await gateway.registry.log.masks.apply(event)
    await _check_amount(gateway, event)
    state = await _state_of(gateway, opened)
    use = _use_of(gateway.config, event, opened.owner, state)
    return event, {"trajectory": event.trajectory, "call": event.call, **state, "use": use}


async def _last_answer_of(request: ControlRequest, trajectory: str, owner: str) -> tuple[str, str]:
    """Return the last answer of a run as text, with its tool calls as JSON, and the version that gave it. It is what a
    call of another run, which `owner` opened, should have answered (`corrected_by`). Raises an `ApiError`: 404 if there
    is none or the run is another key's, 403 if nothing may learn from it."""
    gateway, access, last = request.gateway, request.access, None
    opened = await _opening_to_grade(gateway, trajectory, access)
    if opened.owner != owner and not access.operator:
        raise unknown_trajectory(trajectory, "`corrected_by` is the id of a run that the same key opened.")
    async with request.reading(opened) as count_bytes:
        async for call in gateway.registry.log.calls(trajectory):
            count_bytes(size_of(call))
            if call.status == "complete" and not call.choice and not call.side_call:
                last = call
    try:
        message = msgspec.json.decode(last.response if last is not None else b"")["choices"][0]["message"]
        calls = [msgspec.json.encode(made["function"]).decode() for made in message.get("tool_calls") or ()]
        text = "\n".join(filter(None, [text_of(message.get("content")), *calls]))
    except (msgspec.MsgspecError, AttributeError, LookupError, TypeError):
        text = ""
    if last is None or not 0 < len(text) <= LONGEST_TEXT:
        message = f"Run {trajectory!r} has no last answer of up to {LONGEST_TEXT:,} characters."
        raise ApiError(404, "exchange_not_found", message, param="corrected_by")
    if not gateway.config.may_train(last.policy_version):
        name = outside_model(last.policy_version)
        message = (
            f"The outside model {name!r} answered run {trajectory!r}, and not all [[outside]] tables of this name say "
            "`may_train = true`: nothing may learn from it. If the provider's terms permit it, the operator can set it."
        )
        raise ApiError(403, "may_not_train", message, param="corrected_by")
    return text, last.policy_version


async def _opening_to_grade(gateway: Gateway, trajectory: str, access: Access) -> TrajectoryOpened:
    """Return the opening of a run that the caller may give feedback on. Raises an `ApiError`: 404 if there is none, 410
    if the log no longer holds all of it, 403 for a trajectory's key of another run."""
    check_name(trajectory)
    if access.trajectory:
        check_own_trajectory(trajectory, access.trajectory)
    opened = await gateway.registry.opening(trajectory)
    gateway.registry.log.check_age(trajectory, opened.at if opened is not None else 0)
    may_grade_any = access.trajectory or access.feedback_only
    models = (opened.model, opened.named) if opened is not None else ()
    if opened is None or not (may_grade_any or access.owns(opened.owner)) or not any(map(access.sees, models)):
        raise unknown_trajectory(
            trajectory, "Send the id of a run or answer as its client got it, with a key that may grade it."
        )
    return opened


async def _check_amount(gateway: Gateway, event: SignalGiven) -> None:
    """Raise a 409 `ApiError` if the key has given as many signals, or as much text, on the run as it may: judge and
    trainer read all signals of a run. Requests at the same moment may exceed the number by a few."""
    run: dict[str, Any] = {name: getattr(event, name) for name in ("project", "model", "group", "trajectory")}
    given = await gateway.broker.subjects(stream_of(SignalGiven), subject_filter(SignalGiven, **run))
    if len(event.text) > _LONG_TEXT:
        own = await gateway.broker.read(SignalGiven, **run)
        others = sum(len(r.event.text) for r in own if r.event.by == event.by and r.event.signal != event.signal)
        if others + len(event.text) > _MAX_TEXT:
            message = (
                f"The texts of this key on the run {event.trajectory!r} exceed {_MAX_TEXT:,} characters. "
                "Send a shorter one."
            )
            raise ApiError(409, "too_many_signals", message, param="text")
    signals = {name_of_token(subject.rpartition(".")[2]) for subject in given}
    owner, most = event.signal.partition(":")[0], gateway.config.feedback.max_signals
    if event.signal not in signals and sum(s.partition(":")[0] == owner for s in signals) >= most:
        message = (
            f"This key has given {most} signals on the run {event.trajectory!r}, as many as `feedback.max_signals` "
            "lets it."
        )
        raise ApiError(409, "too_many_signals", message)


async def _call_number(request: ControlRequest, opened: TrajectoryOpened, call: int | str) -> int:
    """Return the number of a call of a run, given as such or as the id of its answer; -1, the whole run, stays. Raises
    a 404 `ApiError`."""
    if call == -1:
        return -1
    gateway, trajectory = request.gateway, opened.trajectory
    if isinstance(call, str):
        run = await gateway.registry.find_to_read(trajectory)
        async with request.reading(opened) as count_bytes:
            exchange = (await run.exchanges_of([call], count_bytes, complete=False)).get(call)
        if exchange is None:
            raise _unknown_answer(call, f"Run {trajectory!r}")
        return exchange.seq
    completed = await gateway.registry.log.completion(opened)
    if completed is not None:
        calls = completed.calls
    else:
        run = await gateway.registry.find_to_read(trajectory)
        await run.refresh()
        calls = run.recorded.next_seq
    if call >= calls:
        message = f"Run {trajectory!r} has {calls} calls, numbered from 0: there is no call {call}."
        raise ApiError(404, "exchange_not_found", message, param="call")
    return call


def _use_of(
    config: Config, event: SignalGiven, owner: str, state: Mapping[str, str]
) -> Literal["reward", "call_reward", "hint", "history"]:
    """Return what the settings make of a signal on a run of `owner` in this state (`_state_of`): the run's reward, the
    reward of a call, or a hint for training. `history`: no setting uses it, or it comes too late."""
    # A group that was discarded for want of rewards is scored once they come.
    rescued = state.get("reason") == "unscored" and any(r.kind == "feedback" for r in config.judge.rewards)
    if state["run"] in ("scored", "discarded") and not (rescued and config.feedback.late == "train"):
        return "history"
    if event.kind != "number":
        distills = [config.trainer_of(m).distill for m in config.models if m.name == event.model]
        return "hint" if any(d.weight and not d.asks_outside for d in distills) else "history"
    rewards = [r for r in config.judge.rewards if r.kind == "feedback" and r.name == event.name]
    if any(not r.by or event.by in r.by for r in rewards):
        return "reward" if event.call < 0 else "call_reward"
    # A setting of this name takes the numbers of its keys only, not those of the run's owner.
    is_own = not rewards and event.name == OWN_REWARD and event.by == owner
    return "call_reward" if is_own and event.call >= 0 else "history"


async def _state_of(gateway: Gateway, opened: TrajectoryOpened) -> dict[str, str]:
    """Return what has become of a run: `open`, `completed`, `scored`, or `discarded` with the reason."""
    if await gateway.registry.log.completion(opened) is None:
        return {"run": "open"}
    keys: dict[str, Any] = {
        "project": opened.project,
        "model": opened.model,
        "group": group_key(opened.group, opened.trajectory),
        "branch": "main",
    }
    for scored in reversed(await gateway.broker.read(GroupScored, **keys)):
        if any(m.trajectory == opened.trajectory and m.outcome == "scored" for m in scored.event.members):
            return {"run": "scored"}
    for discarded in reversed(await gateway.broker.read(GroupDiscarded, **keys)):
        if opened.trajectory in discarded.event.trajectories:
            return {"run": "discarded", "reason": discarded.event.reason}
    return {"run": "completed"}


def _unknown_answer(answer: str, where: str = "The log") -> ApiError:
    """Return the 404 for an id of no recorded answer. `where`: what was searched for the answer."""
    message = (
        f"{where} has no answer {answer!r}. Send the id as the client got it. An answer is recorded only if its call "
        "belongs to a run (docs/gateway.md says how a call names its run), and the log keeps it for "
        "nats.rollouts_max_age_h."
    )
    return ApiError(404, "exchange_not_found", message, param="answer")
