"""Asks a teacher from outside (`[teacher]`) about the tokens that runs sampled, and puts its answers on the log.

A teacher is a vLLM server with a larger model and the policy's tokenizer; its logprobs of the recorded tokens pull the
policy towards it (`trainer.distill`). The judge service asks before it publishes the scored group, and the group's
event names the runs with an answer. So the answers are on the log when the trainer reads the group: nothing waits for
the teacher but the group itself, at most `teacher.wait_s`. A run without an answer trains with its reward alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import numpy.typing as npt

from judge.models.params import read_key
from pipeline import crash
from pipeline.chat.images import Media, media_of
from pipeline.chat.sampling import NO_DEFAULTS, sampling_of
from pipeline.concurrency.backoff import Backoff
from pipeline.concurrency.concurrently import concurrently
from pipeline.config import Config, ConfigError
from pipeline.events import (
    ExchangeRecorded,
    TeacherAnswered,
    TrajectoryCompleted,
    now_us,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.telemetry.logs import get_logger

logger = get_logger("judge.teacher")

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_MAX_CHECKED_AT_ONCE = 4096
"""Most tokens of the vocabulary in one request of the tokenizer's check."""
_SHOWN = 40
"""Characters that an error shows of two texts where they begin to differ."""
_TOKENS_A_TOKEN = 4
"""Tokens, at most and on average, into which a tokenizer divides the text of one token of the vocabulary. The text of a
request must not have more tokens than the server's context."""
_STATUSES_WITHOUT_TEXT_OF_RUNS = (401, 403, 404, 429)
"""Errors about access, whose text is logged. Others may repeat the tokens of a run."""
_RETRIED_STATUSES = (408, 409, 425, 429)
"""Client errors that may pass, as those of the server may."""
_MIN_LOGPROB = -50.0
"""Least logprob that is recorded, in nats. vLLM writes -9999 for a token that the teacher would never sample; as an
advantage it would outweigh a whole batch."""


class TeacherError(Exception):
    """The teacher did not answer, or not what was asked."""


@dataclass
class JoinedCalls:
    """Calls that continue each other, which the teacher reads in one request."""

    ids: Ids
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each call: its place among the run's calls, where its sampled tokens begin in `ids`, and their number."""


def join_calls(calls: Sequence[ExchangeRecorded]) -> list[JoinedCalls]:
    """Join the calls of a run into as few sequences of tokens as possible. A call is joined to an earlier one if its
    prompt begins with all tokens of that one, reply included."""
    joined: list[JoinedCalls] = []
    for place, call in enumerate(calls):
        prompt, sampled = unpack_ids(call.prompt_ids), unpack_ids(call.sampled_ids)
        continued = [c for c in joined if np.array_equal(c.ids, prompt[: len(c.ids)])]
        conversation = max(continued, key=lambda c: len(c.ids), default=None)
        if conversation is None:
            conversation = JoinedCalls(prompt[:0])
            joined.append(conversation)
        conversation.calls.append((place, len(prompt), len(sampled)))
        conversation.ids = np.concatenate([prompt, sampled])
    return joined


class Teacher:
    """Asks the server of `[teacher]`. Any number of judge processes may do so."""

    def __init__(self, config: Config, broker: Broker, client: httpx.AsyncClient) -> None:
        self.config, self._broker, self._client = config.teacher, broker, client
        self._models = {m.name: m for m in config.models if config.trainer_of(m).distill.asks_outside}
        distill = {name: config.trainer_of(m).distill for name, m in self._models.items()}
        self._top_k = {name: d.top_k if d.divergence == "reverse_kl" else 0 for name, d in distill.items()}
        self._limit = anyio.CapacityLimiter(self.config.concurrency)
        self._checking = anyio.Lock()
        self._vocabulary: dict[str, int] = {}
        """Number of tokens of each base model whose tokenizer was compared with the teacher's."""
        self._compared_up_to: dict[str, int] = {}
        """How many tokens of a base model were compared so far. A check that was cancelled (`teacher.wait_s`) goes on
        there; if each group began anew, a slow server would never be done."""

    # -- the tokenizer -------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compare the teacher's tokenizer with those of the models' bases. Raises `ConfigError` with the first text
        that differs, and `TeacherError` if the server does not answer."""
        for model in self._models.values():
            await self._check_tokenizer(model.base)

    async def _check_tokenizer(self, base: str) -> int:
        """Compare the teacher's tokenizer with that of a base model, over the whole vocabulary, once. Returns its
        size. Raises `ConfigError` where they differ, and `TeacherError` if the server does not answer."""
        async with self._checking:
            if base not in self._vocabulary:
                tokenizer = _tokenizer(base)
                size, at_once = tokenizer.get_vocab_size(), await self._ask_tokens_per_check()
                for first in range(self._compared_up_to.get(base, 0), size, at_once):
                    end = min(first + at_once, size)
                    await self._compare(tokenizer, range(first, end), base)
                    self._compared_up_to[base] = end
                self._vocabulary[base] = size
        return self._vocabulary[base]

    async def _compare(self, tokenizer: Any, ids: Sequence[int], base: str) -> None:
        """Compare `tokenizer`, that of the model `base`, with the teacher's by the tokens `ids`: their text, in one
        request, and the tokens of that text, in another. Raises `ConfigError` with the first difference."""
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        text_here = _unspaced(text)
        text_there = _unspaced(await self._ask_tokenizer("detokenize", "prompt", tokens=list(ids)))
        if (at := _first_difference(text_here, text_there)) is not None:
            here, there = text_here[at : at + _SHOWN], text_there[at : at + _SHOWN]
            raise self._tokenizer_error(base, f"tokens {ids[0]} to {ids[-1]}: {here!r} here and {there!r} there")
        ids_here = tokenizer.encode(text, add_special_tokens=False).ids
        ids_there = await self._ask_tokenizer("tokenize", "tokens", prompt=text, add_special_tokens=False)
        if (at := _first_difference(ids_here, ids_there)) is not None:
            before = tokenizer.decode(ids_here[:at])[-_SHOWN:]
            here, there = ids_here[at : at + 1] or "nothing", ids_there[at : at + 1] or "nothing"
            raise self._tokenizer_error(base, f"behind {before!r} a text has token {here} here and {there} there")

    async def _ask_tokens_per_check(self) -> int:
        """Return how many tokens of the vocabulary to compare in one request, so that their text fits into the context
        that the server says its model has."""
        try:
            models = (await self._client.get(self.config.url.rstrip("/") + "/models")).json()["data"]
            context = max(int(m["max_model_len"]) for m in models if m["id"] == self.config.model)
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            context = 0  # it does not say: suppose a small model
        return min(_MAX_CHECKED_AT_ONCE, max(context // _TOKENS_A_TOKEN, 64))

    async def _ask_tokenizer(self, path: str, key: str, **body: Any) -> Any:
        """Return the field `key` of vLLM's answer to `/tokenize` or `/detokenize`. Raises `TeacherError`."""
        url = self.config.url.rstrip("/").removesuffix("/v1")
        answer = await self._post(f"{url}/{path}", {"model": self.config.model, **body})
        if not isinstance(answer, dict) or not isinstance(answer.get(key), str | list):
            raise TeacherError(f"/{path} returned no {key}: is it a vLLM server?")
        return answer[key]

    def _tokenizer_error(self, base: str, difference: str) -> ConfigError:
        """Return the error that the teacher's tokenizer differs from that of the model `base`."""
        return ConfigError(
            f"teacher.model: {self.config.model} has another tokenizer than {base}: {difference}. Choose a teacher "
            "with the policy's tokenizer"
        )

    # -- answers -------------------------------------------------------------------------------------------------

    async def __call__(self, runs: Sequence[TrajectoryCompleted]) -> dict[str, str]:
        """Ask the teacher about the runs whose answer is not on the log yet, and put its answers there, within
        `teacher.wait_s`. Returns the teacher's name by trajectory, for the runs that have an answer then. Raises
        `ConfigError` as `check` does."""
        answered: dict[str, str] = {}

        async def answer(run: TrajectoryCompleted) -> None:
            """Ask about a run, unless its answer is on the log, and note it in `answered`; log why there is none."""
            names: dict[str, Any] = {"project": run.project, "trajectory": run.trajectory}
            try:
                # An answer is there if a judge died before it published the group.
                if not await self._broker.read(TeacherAnswered, **names, teacher=self.config.model):
                    exchanges = await self._broker.read(ExchangeRecorded, **names, at_least=run.exchanges)
                    await self._broker.publish(await self._answer(run.model, [r.event for r in exchanges]))
                    crash.point("judge.teacher_answered")
                answered[run.trajectory] = self.config.model
            except (TeacherError, HistoryGoneError) as error:
                logger.error("no teacher for a run", reason=str(error)[:500], **names)

        asked = [run for run in runs if run.model in self._models and run.split == "train"]
        with anyio.move_on_after(self.config.wait_s) as scope:
            await concurrently(answer, asked, self.config.concurrency)
        if scope.cancelled_caught:
            missing = [run.trajectory for run in asked if run.trajectory not in answered]
            logger.error("no teacher for runs", reason="teacher.wait_s is over", trajectories=missing[:20])
        return answered

    async def _answer(self, model: str, exchanges: Iterable[ExchangeRecorded]) -> TeacherAnswered:
        """Ask about all sampled tokens of a run and return the event with the answers. Raises `TeacherError`, also for
        runs that a teacher can't be asked about: with images, of another temperature than 1, or too long."""
        began = time.monotonic()
        vocabulary = await self._check_tokenizer(self._models[model].base)
        top_k = min(self._top_k[model], vocabulary)
        calls = TeacherAnswered.calls_of(exchanges)
        if not calls:
            raise TeacherError("the run has no recorded tokens")
        if any(media_of(call.request) != Media() for call in calls):
            raise TeacherError("the run has images or other media, which are not sent to a teacher")
        temperatures = [sampling_of(call.request, NO_DEFAULTS).temperature for call in calls]
        if 1 not in temperatures:
            raise TeacherError(
                f"the run was sampled at temperature {temperatures[0]:g}, and a teacher's logprobs are those of "
                "temperature 1: sample runs that it is to teach at temperature 1"
            )
        asked = join_calls(calls)
        tokens = sum(len(c.ids) for c in asked)
        if 0 < self.config.max_tokens < tokens:
            raise TeacherError(f"the run has {tokens} tokens, more than teacher.max_tokens")
        parts: dict[int, tuple[Any, ...]] = {}
        for conversation in asked:
            entries = await self._prompt_logprobs(conversation.ids, top_k)
            for place, start, count in conversation.calls:
                of_call = slice(start, start + count)
                parts[place] = parse_logprobs(entries[of_call], conversation.ids[of_call], top_k, vocabulary)
        in_order = zip(*(parts[i] for i in range(len(calls))), strict=True)
        logprobs, top_ids, top_logprobs = (np.concatenate(part).ravel().tolist() for part in in_order)
        return TeacherAnswered(
            project=calls[0].project,
            trajectory=calls[0].trajectory,
            teacher=self.config.model,
            at=now_us(),
            logprobs=pack_logprobs(logprobs),
            top_k=top_k,
            top_ids=pack_ids(top_ids),
            top_logprobs=pack_logprobs(top_logprobs),
            requests=len(asked),
            tokens=tokens,
            latency_s=time.monotonic() - began,
        )

    async def _prompt_logprobs(self, ids: Ids, top_k: int) -> list[Any]:
        """Return vLLM's `prompt_logprobs` of a sequence of tokens: an entry for each. Raises `TeacherError`."""
        body = {
            "model": self.config.model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "prompt_logprobs": top_k,
            "temperature": 1.0,
        }
        answer = await self._post(self.config.url.rstrip("/") + "/completions", body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            if len(entries) == len(ids):
                return list(entries)
        except (KeyError, IndexError, TypeError) as error:
            raise TeacherError("its answer has no prompt_logprobs: is it a vLLM server?") from error
        raise TeacherError(f"its answer has logprobs of {len(entries)} of {len(ids)} tokens")

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        """Post a JSON body and return the JSON of the answer. Failures that may pass are tried again, up to
        `teacher.retries` times. Raises `TeacherError` if no attempt is answered with status 200."""
        backoff, problem = Backoff(0.2, 10.0), ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                await backoff.wait()
            try:
                async with self._limit:
                    response = await self._client.post(url, json=body)
                if response.status_code == 200:
                    return response.json()
                problem = f"HTTP {response.status_code}"
                if response.status_code in _STATUSES_WITHOUT_TEXT_OF_RUNS:
                    problem += f": {response.text[:300]}"
                if response.status_code < 500 and response.status_code not in _RETRIED_STATUSES:
                    break
            except (httpx.HTTPError, ValueError) as error:  # ValueError: a body that is not JSON
                problem = f"{type(error).__name__}: {error}"
        raise TeacherError(f"{url}: {problem}")


def parse_logprobs(entries: Sequence[Any], ids: Ids, top_k: int, vocabulary: int) -> tuple[Floats, Ids, Floats]:
    """Read vLLM's entries of the n tokens `ids`: in each, logprobs by token id. Returns the logprobs of these tokens,
    [n], and the ids and logprobs of the `top_k` most probable ones at each place, [n, top_k] each. Ids from
    `vocabulary` on, with which models are padded, are left out. Raises `TeacherError` for an entry that is not vLLM's,
    or lacks one of these logprobs."""
    logprobs = np.zeros(len(ids), np.float32)
    top_ids, top_logprobs = np.zeros((len(ids), top_k), np.int32), np.zeros((len(ids), top_k), np.float32)
    for n, (entry, token) in enumerate(zip(entries, ids.tolist(), strict=True)):
        try:
            logprob_of = {int(k): max(float(v["logprob"]), _MIN_LOGPROB) for k, v in (entry or {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TeacherError("its prompt_logprobs are not vLLM's") from error
        if not all(logprob <= 1e-3 for logprob in logprob_of.values()):
            raise TeacherError("its prompt_logprobs are no logprobs")
        best = sorted((k for k in logprob_of if 0 <= k < vocabulary), key=lambda k: -logprob_of[k])[:top_k]
        if token not in logprob_of or len(best) < top_k:
            raise TeacherError(f"it told {len(logprob_of)} logprobs of a token, not its own and the {top_k} best")
        logprobs[n] = logprob_of[token]
        top_ids[n], top_logprobs[n] = best, [logprob_of[k] for k in best]
    return logprobs, top_ids, top_logprobs


@asynccontextmanager
async def open_teacher(config: Config, broker: Broker) -> AsyncIterator[Teacher | None]:
    """Open the teacher of the settings; `None` if no model learns from one. If the server does not answer, its
    tokenizer is checked before its first answer. Raises `ConfigError` for another tokenizer, and for a missing key."""
    settings = config.teacher
    if not any(config.trainer_of(model).distill.asks_outside for model in config.models):
        yield None
        return
    key = read_key(settings.api_key_env, "teacher.api_key_env")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=settings.concurrency)
    async with httpx.AsyncClient(headers=headers, timeout=settings.timeout_s, limits=limits) as client:
        teacher = Teacher(config, broker, client)
        try:
            await teacher.check()
        except TeacherError as error:
            logger.error("the teacher does not answer: runs train without it until it does", reason=str(error)[:500])
        yield teacher


def _first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Return the place at which two sequences begin to differ; `None` if they are equal."""
    return next((at for at, (x, y) in enumerate(itertools.zip_longest(a, b)) if x != y), None)


def _unspaced(text: str) -> str:
    """Return the text without spaces, which some tokenizers remove before punctuation marks as they decode."""
    return text.replace(" ", "")


def _tokenizer(base: str) -> Any:
    """Read the tokenizer of a base model, from its folder or the Hugging Face hub. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        if Path(base).is_dir():
            return Tokenizer.from_file(str(Path(base) / "tokenizer.json"))
        return Tokenizer.from_pretrained(base)
    except Exception as error:  # tokenizers raises no narrower class
        raise ConfigError(f"models.base: the tokenizer of {base} can't be read: {error}") from error
