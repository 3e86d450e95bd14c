"""A model that is not the policy is in no step except as `may_train` allows: a property of one log, whatever is on it.

The judge's reading of signals, the trainer's of histories and the rows of data sets all see the same log. Every answer
on it has a number of its own: as a token id where tokens are recorded, and as a word of its text."""

import re
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from judge.feedback import feedback_on, hint_of
from pipeline import events
from pipeline.chat.conversations import build_conversations
from pipeline.chat.sampling import Defaults
from pipeline.commands.apprentice import best_runs
from pipeline.config import Config, ConfigError, JudgeConfig, ModelConfig, OutsideConfig
from pipeline.log.messages import Place
from pipeline.names import is_outside, outside_model, outside_version
from store.datasets.rows import FORMATS, rows_of
from store.datasets.runs import Run
from tests.kits.settings import with_values
from tests.store.kit import compared, shadow, signal
from tests.trainer.kit import MODEL, exchange
from trainer.batches.examples import make_examples
from trainer.batches.groups import AdmittedGroup, GroupWithHistory
from trainer.batches.histories import Histories
from trainer.distillation.prompts import HintedPrompts
from trainer.tiny import make_tokenizer

OUTSIDE = tuple(outside_version(name) for name in ("permitted", "forbidden", "a:b", f"{MODEL}@3"))
PERMITTED = OUTSIDE[0]
SHARED: dict[str, Any] = {"project": "p", "model": MODEL, "group": "g"}


class Told(NamedTuple):
    """A run of the group: who answered each call, and what was said of it."""

    versions: tuple[str, ...]
    reward: float
    corrected_by: str
    """The version whose answer somebody gave as a correction; empty: none."""
    healed_by: str
    shadowed: bool


versions = st.sampled_from([f"{MODEL}@0", f"{MODEL}@3", *OUTSIDE])
writers = st.sampled_from(["", f"{MODEL}@1", *OUTSIDE])
runs = st.builds(
    Told,
    st.lists(versions, min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.0, 0.5, 1.0]),
    writers,
    st.sampled_from(["", *OUTSIDE]),
    st.booleans(),
)


class Log:
    """The events of some runs, and which version each numbered answer is by."""

    def __init__(self, told: Sequence[Told]) -> None:
        self.events: list[events.Event] = []
        self.by: dict[int, str] = {}
        for number, run in enumerate(told):
            self._run(f"r{number}", run)

    def _say(self, version: str) -> int:
        number = 1000 + len(self.by)
        self.by[number] = version
        return number

    def _put(self, event: events.Event) -> None:
        self.events.append(events.decode(events.encode(event)))  # type: ignore[arg-type]

    def _run(self, name: str, run: Told) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        prompt = [5]
        for seq, version in enumerate(run.versions):
            said = self._say(version)
            reply = {"role": "assistant", "content": f"w{said}"}
            request, response = {"messages": list(messages)}, {"choices": [{"message": reply}]}
            # A faulty gateway records tokens of outside models, too.
            bodies = {"request": msgspec.json.encode(request), "response": msgspec.json.encode(response)}
            self._put(exchange(name, seq, prompt, [said], policy_version=version, **bodies))
            prompt = [*prompt, said, 6]
            messages += [reply, {"role": "user", "content": "on"}]
        corrected = partial(signal, name, model=MODEL, kind="correction", call=0)
        if run.corrected_by:
            text = f"w{self._say(run.corrected_by)}"
            self._put(corrected(signal="c", text=text, source=run.corrected_by))
        if run.healed_by:
            text = f"w{self._say(run.healed_by)}"
            self._put(corrected(signal="h", text=text, by=run.healed_by, source="healing"))
        if run.shadowed:
            said = self._say("shadow")
            response = {"choices": [{"message": {"role": "assistant", "content": f"w{said}"}}]}
            tokens = {"sampled_ids": events.pack_ids([said]), "logprobs": events.pack_logprobs([-1.0])}
            self._put(shadow(name, model=MODEL, response=msgspec.json.encode(response), **tokens))
            self._put(compared(name, 0, 0.0, 1.0))

    async def read(self, event: type[Any], *, at_least: int = 0, **keys: Any) -> list[Any]:
        found = [e for e in self.events if isinstance(e, event)]
        return [SimpleNamespace(event=e) for e in found if all(getattr(e, k) == v for k, v in keys.items())]

    def of(self, event: type[Any], name: str) -> list[Any]:
        return [e for e in self.events if isinstance(e, event) and e.trajectory == name]  # type: ignore[attr-defined]

    def scored(self, told: Sequence[Told]) -> events.GroupScored:
        """The group, with the hints that the judge makes of the signals."""
        completed = [events.TrajectoryCompleted(**SHARED, trajectory=f"r{n}", exchanges=0) for n in range(len(told))]
        signals = [e for e in self.events if isinstance(e, events.SignalGiven)]
        given = [s for s in signals if s.source != "healing"]
        feedback = feedback_on(completed, given, JudgeConfig(), {})
        members = []
        for number, run in enumerate(told):
            name = f"r{number}"
            hints = feedback[name].hints if name in feedback else ()
            healed = tuple(hint_of(s) for s in signals if s.source == "healing" and s.trajectory == name)
            steps = {"first_step": 0, "last_step": 3, "exchanges": len(run.versions)}
            members.append(events.Member(trajectory=name, reward=run.reward, hints=(*hints, *healed), **steps))
        return events.GroupScored(**SHARED, judge="j", members=tuple(members))

    def to_export(self, told: Sequence[Told]) -> list[Run]:
        out = []
        for number, run in enumerate(told):
            calls = self.of(events.ExchangeRecorded, name := f"r{number}")
            by, conversations = tuple(sorted({e.policy_version for e in calls})), build_conversations(calls)[0]
            out.append(Run("p", name, "g", "t", MODEL, "train", "scored", run.reward, by, (b"",), conversations))
        return out


def settings() -> Config:
    tables = [("permitted", True), ("forbidden", False), ("forbidden", True)]
    outside = tuple(OutsideConfig(name=name, url="http://h/v1", may_train=may) for name, may in tables)
    config = Config(project="p", models=(ModelConfig(name=MODEL),), outside=outside)
    taught = {"distill.weight": 1.0, "distill.best_run_reward": 0.5, "max_staleness": 5}
    return with_values(config, {f"trainer.{name}": value for name, value in taught.items()})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> HintedPrompts:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer([]).save_pretrained(folder)
    return HintedPrompts(str(folder), settings().trainer.distill)


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"w(\d{4})", text)}


@given(st.lists(runs, min_size=2, max_size=5))
def test_a_step_and_a_data_set_have_only_what_may_train(prompts: HintedPrompts, told: list[Told]) -> None:
    config, log = settings(), Log(told)
    histories = Histories(log, config.trainer, Defaults(), prompts, config.may_train)  # type: ignore[arg-type]
    read = anyio.run(histories.read, AdmittedGroup(log.scored(told), Place(1, 0)))
    assert isinstance(read, GroupWithHistory)
    ready = read.within_staleness(3, config.trainer)
    batch = make_examples([ready], config.trainer) if isinstance(ready, GroupWithHistory) else []
    own = {number for number, version in log.by.items() if not is_outside(version) and version != "shadow"}
    may = own | {number for number, version in log.by.items() if version == PERMITTED}

    trained = {int(token) for e in batch for token in e.sequence.ids[e.sequence.loss_mask]}
    sampled = {n for e in log.events if isinstance(e, events.ExchangeRecorded) for n in numbers(e.response.decode())}
    assert trained == (own & sampled if batch else set()), "every token of the policy's calls, and no other"

    asked = {(e.trajectory, e.seq): e.request.decode() for e in log.events if isinstance(e, events.ExchangeRecorded)}
    for run, of_call in read.history.teacher_prompts.items():
        for call, prompt in of_call.items():
            added = numbers(prompts._tokenizer.decode(prompt)) - numbers(asked[run, call])
            assert added <= may, "hints and the best run's transcript"
    for number, run_told in enumerate(told):
        for writer in filter(None, (run_told.corrected_by, run_told.healed_by)):
            prompt = read.history.teacher_prompts.get(f"r{number}", {}).get(0)
            text = "" if prompt is None else prompts._tokenizer.decode(prompt)
            texts = [s.text for s in log.of(events.SignalGiven, f"r{number}") if s.version == writer]
            assert all((text_of in text) is config.may_train(writer) for text_of in texts), "what is allowed is shown"

    for kind in FORMATS:
        rows, _ = rows_of(log.to_export(told), kind, may_train=config.may_train)
        written = numbers(str(rows))
        assert written <= (set() if kind == "prompts" else may)
        if kind == "sft":
            whole = [n for n, run in enumerate(told) if all(map(config.may_train, run.versions))]
            calls = [call for n in whole for call in log.of(events.ExchangeRecorded, f"r{n}")]
            assert written == {number for call in calls for number in numbers(call.response.decode())}


@pytest.mark.parametrize("version", OUTSIDE)
def test_an_apprentice_starts_from_a_permitted_model_only(version: str) -> None:
    assert outside_version(outside_model(version)) == version
    assert settings().may_train(f"{outside_model(version)}@3"), "a policy of the same name"
    if version == PERMITTED:
        assert version in best_runs(settings(), "permitted", 10, 0.5)
    else:
        with pytest.raises(ConfigError, match=r"may_train is false|no .* table has the name"):
            best_runs(settings(), outside_model(version), 10, 0.5)
