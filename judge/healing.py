"""Healing (`judge.healing`): an outside model corrects the call at fault of a run that scored low.

An outside model is a provider's model behind the gateway. The judge service asks it before it publishes a scored group,
as it does with a teacher from outside. The outside model answers the call at fault anew, through the gateway, from the
messages that the policy had. Its answer teaches only if the judge model scores it higher than the policy's: then it is
on the log as a signal of kind `correction`, and among the hints of the group's member, and `trainer.distill` learns
from it as from any correction."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec

from judge.comparing import compare_answers
from judge.errors import UnscoredError
from judge.feedback import hint_of
from judge.models.params import read_key
from judge.ruler.ruler import LlmRuler
from judge.ruler.transcripts import indented, render_message
from pipeline import crash
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config
from pipeline.events import AnswersCompared, ExchangeRecorded, GroupScored, Hint, Member, SignalGiven
from pipeline.events.types import REWARD_TOLERANCE
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.names import is_version, outside_version, parse_version
from pipeline.running.ports import http_url
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.healing")

NAME = "healing"
"""Name and source of the signals."""
_KEPT_FIELDS = ("messages", "tools", "tool_choice", "response_format", "max_tokens", "max_completion_tokens")
"""Fields of the policy's call that the outside model is asked with; others, such as `seed`, are about the policy."""
_DAY_US = 86_400_000_000
_SHOWN_CHARACTERS = 50_000
"""Characters of a run that the outside model reads to find the call at fault: its end."""
_FAULT_QUESTION = """An agent did a task badly. Its replies are numbered. Which reply was the first that was wrong, the
one to correct? Answer with one JSON object and nothing else: {"reply": <number>}.

"""


class Healer:
    """Heals the runs of scored groups. Any number of judge processes may run one."""

    def __init__(self, config: Config, broker: Broker, ruler: LlmRuler, client: httpx.AsyncClient) -> None:
        """`ruler` compares answers in two passes (`judge.comparing`); `client` posts to the gateway."""
        self._config, self._broker, self._ruler, self._client = config.judge.healing, broker, ruler, client
        self._table = next(t for t in config.outside if t.name == self._config.outside and t.dialect == "chat")
        self._models, self._project = {model.name for model in config.models}, config.project
        self._day, self._read_to = 0, 0
        """The day (UTC, since 1970) whose costs are added up, and the last sequence of the log that was read for it."""
        self._recorded_usd = self._unrecorded_usd = 0.0
        """Costs of that day that are on the log, of all judges; costs of this process that are not on the log yet."""
        self._reading = anyio.Lock()

    async def __call__(self, group: GroupScored) -> GroupScored:
        """Return the group with the corrections of its low runs among their hints, within `judge.healing.wait_s`."""
        if group.split != "train" or group.model not in self._models:
            return group
        low = [m for m in group.members if m.outcome == "scored" and m.reward < self._config.below]
        hints: dict[str, Hint] = {}

        async def correct(member: Member) -> None:
            """Put the correction of a run into `hints`, if there is one. Log an error that prevents it."""
            try:
                if (hint := await self._correct(group, member)) is not None:
                    hints[member.trajectory] = hint
            except (HistoryGoneError, UnscoredError) as error:
                logger.warning("run not healed", trajectory=member.trajectory, reason=str(error)[:500])

        with anyio.move_on_after(self._config.wait_s) as scope:
            await concurrently(correct, low, 8)
        if scope.cancelled_caught:
            logger.error("runs not healed", group=group.group, reason="judge.healing.wait_s is over")
        members = (
            msgspec.structs.replace(m, hints=(*m.hints, hints[m.trajectory])) if m.trajectory in hints else m
            for m in group.members
        )
        return msgspec.structs.replace(group, members=tuple(members)) if hints else group

    async def _correct(self, group: GroupScored, member: Member) -> Hint | None:
        """Ask for a correction of a run, publish it as a signal if the judge model scores it higher than the policy's
        answer, and return it as a hint; else return `None`. Raises `HistoryGoneError` if the log lost calls of the run,
        and `UnscoredError` if the outside model or the judge model gives no answer."""
        names: dict[str, Any] = {"project": group.project, "trajectory": member.trajectory}
        history = await self._broker.read(ExchangeRecorded, **names, at_least=member.exchanges)
        if len(history) < member.exchanges:
            raise HistoryGoneError(f"the whole history of trajectory {member.trajectory}")
        calls = [e for e in (r.event for r in history) if _is_whole_reply(e)]
        if not calls:
            raise UnscoredError("it has no whole chat completion of the policy")
        # Calls that an outside model answered are compared too, with shadow calls.
        if {r.event.call for r in await self._broker.read(AnswersCompared, **names)} & {call.seq for call in calls}:
            # A judge healed the run, and died before it published the group.
            return await self._correction_on_log(group, member)
        compared, correction = await self._ask_and_compare(group, member, calls)
        crash.point("judge.healing_compared")
        if compared.outside_score <= compared.apprentice_score + REWARD_TOLERANCE:
            return None
        by = outside_version(self._table.name)
        signal = SignalGiven(
            **names,
            signal=f"{by}:{compared.call}",
            model=group.model,
            group=group.group,
            call=compared.call,
            name=NAME,
            kind="correction",
            text=correction,
            by=by,
            source=NAME,
        )
        await self._broker.publish(signal)
        return hint_of(signal)

    async def _ask_and_compare(
        self, group: GroupScored, member: Member, calls: Sequence[ExchangeRecorded]
    ) -> tuple[AnswersCompared, str]:
        """Have the outside model answer the call at fault among `calls` anew, and the judge model compare both answers.
        Return the comparison and the text of the outside model's answer. The scores are equal if both answers are, or
        if there is no new one.

        The comparison is published with what the outside model cost, also if an error ends this method, because all
        judges add up these costs. Raises `UnscoredError`."""
        fields: dict[str, Any] = {"project": group.project, "trajectory": member.trajectory, "model": group.model}
        fields |= {"outside": self._table.name, "outside_score": 0.5, "apprentice_score": 0.5}
        compared = AnswersCompared(**fields, call=calls[-1].seq)
        paid: list[float] = []
        try:
            call = await self._call_at_fault(calls, member, paid)
            compared = msgspec.structs.replace(compared, call=call.seq)
            sent = {k: v for k, v in msgspec.json.decode(call.request).items() if k in _KEPT_FIELDS}
            response = await self._ask(sent, paid)
            correction = _reply_text(response)
            if correction and correction != _reply_text(call.response):
                answers = response, call.response
                compared = await compare_answers(self._ruler, call, group.model, self._table.name, *answers)
        finally:
            if paid:
                with anyio.CancelScope(shield=True):
                    await self._broker.publish(msgspec.structs.replace(compared, outside_usd=sum(paid)))
                self._unrecorded_usd -= sum(paid)
        return compared, correction

    async def _correction_on_log(self, group: GroupScored, member: Member) -> Hint | None:
        """Return the correction of a run that an earlier judge process put on the log as a hint; `None` if there is
        none, or `member` has it already. If that process died between the comparison and the signal, the correction is
        lost, because no answer is paid for twice."""
        signals = await self._broker.read(
            SignalGiven, project=group.project, model=group.model, group=group.group, trajectory=member.trajectory
        )
        hints_of_member = {(hint.call, hint.text) for hint in member.hints}
        hints = (hint_of(r.event) for r in signals if r.event.source == NAME)
        return next((hint for hint in hints if (hint.call, hint.text) not in hints_of_member), None)

    async def _call_at_fault(
        self, calls: Sequence[ExchangeRecorded], member: Member, paid: list[float]
    ) -> ExchangeRecorded:
        """Return the call with the lowest reward of its own; without such rewards, the one that the outside model
        names as the first wrong one. `paid`: as for `_ask`. Raises `UnscoredError` if it names none."""
        by_seq = {str(call.seq): call for call in calls}
        rewards = {seq: reward for seq, reward in member.call_rewards.items() if seq in by_seq}
        if rewards:
            return by_seq[min(rewards, key=lambda seq: (rewards[seq], int(seq)))]
        if len(calls) == 1:
            return calls[0]
        last_prompt = msgspec.json.decode(calls[-1].request).get("messages") or ()
        shown = [render_message(message) for message in last_prompt if message.get("role") != "assistant"]
        replies = [f"Reply {call.seq}: {indented(_reply_text(call.response))}" for call in calls]
        text = "\n".join([*shown, *replies])[-_SHOWN_CHARACTERS:]
        answer = _reply_text(await self._ask({"messages": [{"role": "user", "content": _FAULT_QUESTION + text}]}, paid))
        try:
            number = msgspec.json.decode(answer[answer.find("{") : answer.rfind("}") + 1])["reply"]
            return by_seq[str(number)]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UnscoredError("the outside model named no reply as the one at fault") from error

    async def _spent_today(self) -> float:
        """Return the USD that healing cost today: what the log says of all judges, and what this process paid that is
        not on the log yet. The log is read on from where the last call stopped."""
        async with self._reading:
            today, more = int(time.time() // 86_400), True
            if today != self._day:
                self._day, self._recorded_usd = today, 0.0
            while more:
                page = await self._broker.read_page(AnswersCompared, self._read_to + 1, project=self._project)
                self._recorded_usd += sum(r.event.outside_usd for r in page.events if r.event.at // _DAY_US == today)
                self._read_to, more = page.last, page.more
        return self._recorded_usd + self._unrecorded_usd

    async def _ask(self, body: dict[str, Any], paid: list[float]) -> bytes:
        """Return the outside model's chat completion to a request `body`, and add its cost in USD to `paid`. Raises
        `UnscoredError` if there is none, or the day's money is spent."""
        if await self._spent_today() >= self._config.max_usd:
            raise UnscoredError("judge.healing.max_usd of today is spent")
        try:
            answer = await self._client.post("/v1/chat/completions", json={**body, "model": self._table.name})
            response: dict[str, Any] = answer.json()
            if answer.status_code != 200:
                raise UnscoredError(f"the gateway answered {answer.status_code}: {str(response)[:300]}")
            answering_model = str(response.get("model"))
            if is_version(answering_model) and parse_version(answering_model)[0] in self._models:
                # The policy has taken over the outside model's name. Its own answer is no correction.
                raise UnscoredError(f"{answering_model} answered in the place of {self._table.name}")
            usage = response.get("usage") or {}
            tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        except (httpx.HTTPError, AttributeError, TypeError, ValueError) as error:
            raise UnscoredError(f"the gateway at {self._client.base_url}: {type(error).__name__}: {error}") from error
        paid.append((tokens[0] * self._table.input_usd + tokens[1] * self._table.output_usd) / 1e6)
        self._unrecorded_usd += paid[-1]
        return msgspec.json.encode(response)


@asynccontextmanager
async def open_healer(config: Config, broker: Broker, ruler: LlmRuler | None) -> AsyncIterator[Healer | None]:
    """Open the healer of the settings; `None` if there is none. Raises `ConfigError` for a missing key."""
    settings = config.judge.healing
    if not settings.outside or ruler is None:
        yield None
        return
    key = read_key(settings.api_key_env, "judge.healing.api_key_env")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = (settings.url or http_url(config.gateway.host, config.gateway.port)).rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=settings.wait_s, trust_env=False) as client:
        yield Healer(config, broker, ruler, client)


def _is_whole_reply(call: ExchangeRecorded) -> bool:
    """Return whether the policy itself answered a call completely, in chat and as a part of the task. Of a call with
    several choices, only the first one counts."""
    is_complete = call.status == "complete" and not call.choice and not call.side_call
    return is_complete and call.step >= 0 and call.endpoint != "/v1/completions"


def _reply_text(response: bytes) -> str:
    """Return the reply of a chat completion as text, with its tool calls as JSON; empty if it has none."""
    try:
        message = msgspec.json.decode(response)["choices"][0]["message"]
        calls = [msgspec.json.encode(call["function"]).decode() for call in message.get("tool_calls") or ()]
        return "\n".join([*([str(message["content"])] if message.get("content") else []), *calls])
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError):
        return ""
