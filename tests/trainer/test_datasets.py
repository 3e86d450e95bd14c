"""`journeywork train --on`: a step on a data set is a checkpoint like any other."""

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import crash
from pipeline.config import Config, NatsConfig
from pipeline.log.broker import Broker
from pipeline.security import users
from tests.conftest import NatsServer
from tests.trainer import kit
from trainer import datasets
from trainer.checkpoints.commits import TrainerError
from trainer.datasets import DatasetStep, Kind, conversations_as_tokens, train_on
from trainer.learner import Learner, make_learners

BASE = Path(__file__).parents[2] / "examples" / "tictactoe" / "model"
ASKED = [{"role": "user", "content": "a1=. b1=x"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("a1", "c3"))
ROWS: dict[Kind, list[dict[str, object]]] = {
    "sft": [{"messages": [*ASKED, GOOD]}],
    "dpo": [{"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}],
    "kto": [{"prompt": ASKED, "completion": [reply], "label": reply is GOOD} for reply in (GOOD, BAD)],
}


def data(tmp_path: Path, kind: Kind) -> Path:
    folder = tmp_path / kind
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row | {"task": "t"} for row in ROWS[kind]] * 8), folder / "train.parquet")
    return folder


def settings(tmp_path: Path, nats: NatsConfig) -> Config:
    config = kit.settings(str(BASE), tmp_path / "run", nats, groups_per_step=1, keep_checkpoints=10)
    return msgspec.structs.replace(config, run_dir=str(tmp_path / "run"))


def preference(learner: Learner, step: int) -> float:
    """How much more probable the good reply is than the bad one, in nats, at a step's checkpoint."""
    learner.resume(step)
    tokenizer = datasets.AutoTokenizer.from_pretrained(BASE)
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    scores = []
    for reply in (GOOD, BAD):
        ids = torch.tensor([tokenizer(prompt + str(reply["content"]), add_special_tokens=False).input_ids])
        begin = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        with torch.no_grad():
            logprobs = learner.engine.model.peft(input_ids=ids).logits[0, :-1].log_softmax(-1)
        scores.append(float(logprobs.gather(1, ids[0, 1:, None])[begin - 1 :].sum()))
    return scores[0] - scores[1]


@pytest.mark.timeout(300)
async def test_steps_on_data_sets_are_one_lineage_with_those_on_groups(nats_config: NatsConfig, tmp_path: Path) -> None:
    """Each makes the good reply more probable against the bad one, and the optimizer of reinforcement learning goes on
    from where it was."""
    config = settings(tmp_path, nats_config)
    kinds: tuple[Kind, ...] = ("sft", "dpo", "kto")
    async with Broker.connect(nats_config) as broker:
        await kit.publish_group(broker, "g0", [0.0, 1.0], seed=1)
        async with kit.running(config):
            await kit.steps_reach(broker, 1)
        for kind in kinds:
            await train_on(config, DatasetStep(data(tmp_path, kind), kind, learning_rate=1e-2))
        await kit.publish_group(broker, "g1", [0.0, 1.0], seed=2, step=4)
        async with kit.running(config):
            events = await kit.steps_reach(broker, 5)
    assert [e.parent for e in events] == [f"{kit.MODEL}@{n}" for n in range(5)]
    assert [e.groups for e in events] == [("g0",), (), (), (), ("g1",)]
    assert [e.source.split(":")[0] for e in events] == ["", *kinds, ""]
    assert [e.metrics.get("dataset_rows") for e in events] == [None, 8, 8, 16, None]
    learner = make_learners(config)[kit.MODEL]
    found = [preference(learner, step) for step in range(1, 5)]
    assert found == sorted(found)
    learner.resume(5)
    assert learner.state.optimizer is not None
    (updates,) = {int(s["step"]) for s in learner.state.optimizer["state"].values()}
    assert updates == 2


CALL = {"type": "function", "id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}
CONVERSATION = [
    {"role": "system", "content": "win"},
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "free"},
    GOOD,
    {"role": "user", "content": "a1=x b1=x"},
    BAD,
]


def trained_text(
    messages: list[dict[str, object]], max_length: int = 4096, template: str = "", **columns: object
) -> list[list[str]]:
    """What is trained of a conversation, as Parquet holds it: the consecutive tokens of each sequence as texts."""
    rows = pa.Table.from_pylist([{"messages": messages, **columns}]).to_pylist()
    tokenizer = datasets.AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = template or tokenizer.chat_template
    sequences = conversations_as_tokens(Path("data"), rows, tokenizer, max_length, Counter())
    out = []
    for sequence in sequences:
        ids, labels = sequence["input_ids"], sequence["labels"]
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
        spans = [list(part) for trained, part in groupby(labels, lambda label: label != -100) if trained]
        out.append([tokenizer.decode(span) for span in spans])
    return out


def test_sft_trains_the_replies_of_the_assistant_and_nothing_of_users_the_system_and_tools() -> None:
    called = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call><|end|>'
    assert trained_text(CONVERSATION) == [[called, "a1<|end|>", "c3<|end|>"]]
    # A reply without a prompt is context.
    assert trained_text([BAD, *ASKED, GOOD]) == [["a1<|end|>"]]
    # So is one that an agent put into its prompt, where the data set says which ones were sampled.
    assert trained_text([*ASKED, BAD, *ASKED, GOOD], replies=[3]) == [["a1<|end|>"]]


def test_a_template_that_renders_earlier_replies_differently_gives_a_sequence_for_each() -> None:
    shortens = (
        "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
        "{{- '-' if m.role == 'assistant' and not loop.last else m.content -}}{{- '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    chat = [*ASKED, GOOD, *ASKED, BAD]
    assert trained_text(chat, template=shortens) == [["a1<|end|>"], ["c3<|end|>"]]
    opens = shortens.replace("'<|assistant|>'", "'<|assistant|>a1'")
    with pytest.raises(TrainerError, match=r"1 × can't be rendered: .*renders another prompt once message 3"):
        trained_text([*ASKED, *ASKED, *ASKED, BAD], template=opens)


@pytest.mark.parametrize(
    ("messages", "max_length", "told"),
    [
        (ASKED, 4096, "1 × no reply follows another message"),
        ([*ASKED, GOOD], 3, "begins within 3 tokens"),
        (
            [*ASKED, GOOD | {"tool_calls": [CALL | {"function": {"name": "x", "arguments": "{"}}]}],
            4096,
            "1 × can't be rendered: .*no JSON",
        ),
    ],
)
def test_sft_without_a_reply_to_train_is_an_error(
    messages: list[dict[str, object]], max_length: int, told: str
) -> None:
    with pytest.raises(TrainerError, match=told):
        trained_text(messages, max_length)


def test_a_damaged_data_set_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), file)
    with pytest.raises(TrainerError, match="has no column 'messages': write it with `journeywork dataset --as sft`"):
        datasets._table(file, "sft")
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole.replace(b"prompt", b"pro\xffpt"), b"text"):
        file.write_bytes(damaged)
        with pytest.raises(TrainerError, match=f"^{file} can't be read"):
            datasets._table(file, "sft")


@pytest.mark.parametrize("point", ["trainer.before_checkpoint", "trainer.after_checkpoint", "trainer.after_publish"])
async def test_a_step_that_is_killed_is_on_the_log_once_or_not_at_all(
    point: str, nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, step = settings(tmp_path, nats_config), DatasetStep(data(tmp_path, "sft"), "sft")

    class Killed(BaseException):
        pass

    def kill(at: str) -> None:
        if at == point:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(crash, "point", kill)
        with pytest.raises(BaseException) as died:
            await train_on(config, step)
        assert died.group_contains(Killed) if isinstance(died.value, BaseExceptionGroup) else died.type is Killed
    version, _ = await train_on(config, step)
    begun = point != "trainer.before_checkpoint"
    async with Broker.connect(nats_config) as broker:
        events = await kit.checkpoints(broker)
    assert [e.step for e in events] == ([1, 2] if begun else [1])
    assert version == events[-1].version


async def test_the_command_has_the_rights_of_the_trainer_where_services_have_users(
    start_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    keys = tmp_path / "run" / "keys"
    nats = NatsConfig(url=start_nats(extra=users.authorization(keys)).url, users=str(keys))
    async with Broker.connect(nats, name="supervisor"):  # makes the streams
        pass
    config = settings(tmp_path, msgspec.structs.replace(nats, provision=False, publish_deadline_s=60))
    version, _ = await train_on(config, DatasetStep(data(tmp_path, "sft"), "sft"))
    assert version == f"{kit.MODEL}@1"
