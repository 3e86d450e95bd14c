"""`journeywork apprentice`: which runs it takes, what it refuses, and the version that comes out."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.commands import apprentice
from pipeline.config import Config, ConfigError, NatsConfig, OutsideConfig, save
from pipeline.events import CheckpointPublished, Event, SignalGiven, TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from store.reading import sql
from tests.kits.settings import with_values
from tests.store.kit import exchange, fill, scored
from tests.trainer import kit

BASE = Path(__file__).parents[3] / "examples" / "tictactoe" / "model"
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}


def run(name: str, task: str, reward: float | None, version: str = "outside:master", **reply: Any) -> list[Event]:
    """A run with one call that `version` answered."""
    said = {"role": "assistant", "content": "b2", **reply}
    request, response = {"messages": [{"role": "user", "content": task}]}, {"choices": [{"message": said}]}
    bodies = {"request": msgspec.json.encode(request), "response": msgspec.json.encode(response)}
    tokens = {"prompt_ids": b"", "sampled_ids": b"", "logprobs": b""}
    names = {"project": "p", "trajectory": name, "model": "master", "group": f"g-{name}", "task": task}
    return [
        TrajectoryOpened(**names),
        exchange(name, 0, -1, model="master", policy_version=version, **bodies, **tokens),
        TrajectoryCompleted(**names, exchanges=1, reward=reward),
    ]


MASTER = OutsideConfig(name="master", url="http://x/v1", may_train=True)


def taken(run_dir: Path, query: str) -> list[str]:
    with sql.connect(run_dir) as connection:
        return [name for (name,) in connection.sql(query).fetchall()]


def test_best_run_of_each_task_comes_first(tmp_path: Path) -> None:
    """By the reward of the newest verdict, else that of the agent, else the mean of what was said."""
    thumb = {"project": "p", "model": "master", "kind": "number"}
    fill(
        tmp_path,
        *run("a1", "a", 0.9),
        *run("a2", "a", 1.0),
        *run("b1", "b", 1.0),
        scored("g-b1", {"b1": 0.6}),
        *run("c1", "c", None),
        *(SignalGiven(signal=s, trajectory="c1", group="g-c1", value=v, **thumb) for s, v in (("x", 1.0), ("y", 0.4))),
        *run("bad", "d", 0.2),
        *run("unknown", "e", None),
        *run("own", "f", 1.0, "m@1"),
    )
    config = Config(outside=(MASTER,))
    assert taken(tmp_path, apprentice.best_runs(config, None, 10, 0.5)) == ["a2", "c1", "b1", "a1"]
    assert taken(tmp_path, apprentice.best_runs(config, "master", 2, 0.5)) == ["a2", "c1"]
    quoted = Config(outside=(MASTER.replace(name="a'b"),))
    assert taken(tmp_path, apprentice.best_runs(quoted, None, 10, 0.5)) == []


@pytest.mark.parametrize(
    ("tables", "master", "said"),
    [
        ((MASTER, MASTER.replace(may_train=False)), None, r"\[\[outside\]\] master: may_train is false.*in each table"),
        ((), None, "name one of the outside models of the settings: none"),
        ((MASTER,), "other", r"no \[\[outside\]\] table has the name 'other'; there are: master"),
        (
            (MASTER.replace(apprentice="second"),),
            None,
            "its apprentice is 'second', and only the first model of `models`",
        ),
    ],
)
def test_refusals_name_the_table_and_the_setting(
    tables: tuple[OutsideConfig, ...], master: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        apprentice.best_runs(Config(outside=tables), master, 10, 0.5)


@pytest.mark.timeout(300)
async def test_from_the_masters_runs_to_a_version(
    nats_config: NatsConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs that can't be rendered or don't fit are counted, and end nothing."""
    broken = {**CALL, "function": {"name": "look", "arguments": "{"}}
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    fill(
        tmp_path,
        *run("good", "a1=x", 1.0),
        *run("thought", "b1=x", 1.0, reasoning_content="hm", tool_calls=[CALL]),
        *run("broken", "c1=x", 1.0, tool_calls=[broken]),
        *run("long", "a1=x b1=x " * 40, 1.0),
        *run("picture", "a2=x", 1.0, content=picture),
    )
    config = msgspec.structs.replace(kit.settings(str(BASE), tmp_path, nats_config), outside=(MASTER,))
    save(with_values(config, {"vllm.max_model_len": 64}), tmp_path / "config.toml")
    apprentice.main(["--run-dir", str(tmp_path), "--test-share", "0", "--", "--epochs", "1"])
    said = capfd.readouterr().out
    assert "4 rows of 5 runs" in said
    assert "  1 × a conversation with images, audio or files\n" in said
    assert f"trained {kit.MODEL}@1; conversations left out or cut:\n" in said
    assert "1 × can't be rendered: HintUnusableError: arguments of a tool call are no JSON" in said
    assert "1 × no reply follows another message and begins within 64 tokens (--max-length)" in said
    async with Broker.connect(nats_config) as broker:
        (step,) = [r.event for r in await broker.read(CheckpointPublished, project="p")]
    assert step.source.startswith("sft:sha256:")
    assert step.metrics["dataset_rows"] == 2
