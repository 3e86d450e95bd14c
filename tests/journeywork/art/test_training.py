"""Training through a running installation: what is sent, what is refused, and how its end is known."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import journeywork.art as art
from journeywork import Journeywork
from journeywork.art.captured import references_of
from journeywork.art.langgraph import init_chat_model, wrap_rollout
from journeywork.art.local import LocalBackend
from tests.conftest import InferenceDouble
from tests.journeywork.art.kit import BASE, MODEL, installation
from tests.kits.installation import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, inference_double: InferenceDouble) -> Iterator[Up]:
    # Groups of any other training would wait: what is trained here was requested as a batch.
    run_dir = tmp_path_factory.mktemp("art") / "run"
    with installation(run_dir, inference_double.url, **{"trainer.groups_per_step": 50}) as running:
        yield running


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the small model takes less time than a program waits between two looks at it."""
    monkeypatch.setattr("journeywork.art.training._POLL_S", 0.05)


@pytest.fixture
async def model(up: Up, tmp_path: Path) -> Any:
    made = art.TrainableModel(name=MODEL, project="p", base_model=str(BASE), base_path=str(tmp_path))
    backend = art.RemoteBackend(up.url)
    await made.register(backend)
    yield made
    await backend.close()


async def choice_of(model: Any, text: str = "a1=x", **options: Any) -> Choice:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": text}], max_tokens=4, **options
    )
    choice: Choice = completion.choices[0]
    return choice


async def trajectory(model: Any, reward: float, **fields: Any) -> art.Trajectory:
    said: list[Any] = [{"role": "user", "content": "a1=x"}, await choice_of(model)]
    return art.Trajectory(messages_and_choices=said, reward=reward, **fields)


async def group(model: Any, *rewards: float, **fields: Any) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([await trajectory(model, reward) for reward in rewards], **fields)


async def test_a_step_trains_what_it_was_given(up: Up, model: Any) -> None:
    before = await model.get_step()
    backend = model.backend()
    result = await backend.train(
        model, [await group(model, 0, 1), await group(model, 1, 0), await group(model, 0.5, 0.5)], learning_rate=0.01
    )
    assert (result.step, await model.get_step()) == (before + 1, before + 1)
    assert result.version == f"{MODEL}@{before + 1}"
    assert result.metrics["data/step_num_groups_trainable"] == 2
    assert result.metrics["loss/learning_rate"] == 0.01
    with Journeywork(up.url) as gateway:
        (policy,) = gateway.policies()
    assert policy["version"] == result.version, "the step is served when train returns"
    # The next calls are sampled by it, and recorded in another trajectory.
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "a1=x"}], max_tokens=4
    )
    assert reply.model == result.version


async def test_a_row_counts_all_groups_that_were_given(model: Any, tmp_path: Path) -> None:
    groups = []
    for rewards, length in (((1, 2, 3), 3), ((4, 4, 4), 6), ((2, 2, 2), 9)):
        members = [await trajectory(model, reward, metrics={"the length": length}) for reward in rewards]
        groups.append(art.TrajectoryGroup(members))
    groups[2].exceptions.append(art.trajectories.PydanticException(type="E", message="m", traceback=""))
    await model.train(groups)
    row = json.loads((tmp_path / "p" / "models" / MODEL / "history.jsonl").read_text())
    means = {name: value for name, value in row.items() if name.startswith("train/")}
    assert means == {
        "train/reward": pytest.approx(24 / 9),
        "train/the length": 6,
        "train/exception_rate": pytest.approx(0.1),
        "train/reward_std_dev": pytest.approx((2 / 3) ** 0.5 / 3),
    }
    numbers = ("scenarios", "trajectories", "groups_submitted", "groups_trainable")
    assert [row[f"data/step_num_{name}"] for name in numbers] == [3, 10, 3, 1]
    assert row["trainer/trajectories"] == 3, "what the step trained is the trainer's own metric"


async def test_groups_without_a_difference_take_no_step(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = await model.get_step()
    result = await model.backend().train(model, [await group(model, 1, 1), await group(model, 1)])
    assert (result.step, result.version, await model.get_step()) == (before, None, before)
    assert "no step was trained" in caplog.text
    assert (await model.backend().train(model, [])).step == before


async def test_a_trajectory_without_a_choice_is_left_out_and_its_reward_counts(up: Up, model: Any) -> None:
    before = await model.get_step()
    failed = art.Trajectory(messages_and_choices=[{"role": "user", "content": "a1=x"}], reward=-2)
    result = await model.backend().train(
        model, [art.TrajectoryGroup([await trajectory(model, 1), await trajectory(model, 1), failed])]
    )
    assert (result.step, result.metrics["data/step_num_groups_trainable"]) == (before + 1, 1)
    assert result.metrics["data/step_num_trajectories"] == 3
    assert abs(result.metrics["train/reward"]) < 1e-6, "the mean of all three"
    await model.train([art.TrajectoryGroup([failed, failed]), await group(model, 0, 1)])
    assert await model.get_step() == before + 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_calls_of_langchains_chat_model_are_trained(model: Any, streaming: bool) -> None:
    async def rollout(reward: float) -> art.Trajectory:
        chat = init_chat_model(model.get_inference_name(), max_tokens=4, streaming=streaming)
        await chat.ainvoke([("user", "a1=x")])
        return art.Trajectory(reward=reward)

    before = await model.get_step()
    made = [await wrap_rollout(model, rollout)(reward) for reward in (0.0, 1.0)]
    assert [len(references_of(t, "t")) for t in made] == [1, 1]
    await model.train([art.TrajectoryGroup(made)])
    assert await model.get_step() == before + 1


async def test_a_trajectory_from_json_still_names_its_calls(model: Any) -> None:
    made = await trajectory(model, 1)
    again = art.Trajectory.model_validate_json(made.model_dump_json())
    assert references_of(again, "again") == references_of(made, "made")


async def test_choices_of_one_call_are_told_apart(model: Any) -> None:
    completion = await model.openai_client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a1=x"}], max_tokens=4, n=2
    )
    made = [
        art.Trajectory(messages_and_choices=[{"role": "user", "content": "a1=x"}, choice], reward=choice.index)
        for choice in completion.choices
    ]
    assert [references_of(t, "t")[0]["choice"] for t in made] == [0, 1]
    before = await model.get_step()
    await model.train([art.TrajectoryGroup(made)])
    assert await model.get_step() == before + 1


async def test_another_model_is_not_served(up: Up, tmp_path: Path) -> None:
    other = art.TrainableModel(name="chess", project="p", base_model="b", base_path=str(tmp_path))
    with pytest.raises(LookupError, match=f"serves no model 'chess', but: '{MODEL}'"):
        await other.register(art.ServerlessBackend(base_url=up.url))


async def test_validation_is_recorded_and_not_trained(up: Up, model: Any) -> None:
    step = await model.get_step()
    runs = [await trajectory(model, 0.25, metrics={"won": True}), art.Trajectory(reward=0.75)]
    await model.log(runs, split="val", metrics={"mine": 2.0})
    rows = (Path(model.base_path) / "p" / "models" / MODEL / "history.jsonl").read_text()
    assert '"val/reward": 0.5' in rows
    assert '"val/mine": 2.0' in rows
    assert '"val/won": 1.0' in rows
    shown = (Path(model.base_path) / "p" / "models" / MODEL / "trajectories" / "val" / f"{step:04}.jsonl").read_text()
    assert shown.count("\n") == 1, "single trajectories are one group"
    assert await model.get_step() == step


# -- an installation of one's own ------------------------------------------------------------------------------------


async def test_a_local_backend_starts_an_installation_fine_tunes_it_and_joins_it(
    tmp_path: Path, inference_double: InferenceDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BeforeTheDouble(LocalBackend):
        """Its installations have the double in place of a vLLM of their own."""

        def command(self, run_dir: Path, model: Any) -> list[str]:
            return [*super().command(run_dir, model), "--vllm-url", inference_double.url]

    monkeypatch.delenv("JOURNEYWORK_URL", raising=False)
    model = art.TrainableModel(
        name=MODEL,
        project="own",
        base_model=str(BASE),
        _internal_config=art.dev.InternalModelConfig(
            init_args={"max_seq_length": 256}, engine_args={"max_num_seqs": 4}
        ),
    )
    said = [{"role": "user", "content": "a1=. b1=x"}, {"role": "assistant", "content": "a1"}]
    history = art.trajectories.History(messages_and_choices=said)
    tuning = art.Trajectory(messages_and_choices=said, additional_histories=[history])
    async with BeforeTheDouble(path=str(tmp_path), up_options=("--set", "trainer.logprob_bound=1000")) as backend:
        await model.register(backend)
        assert model.base_path == str(tmp_path), "as in ART, its files go to the backend's folder"
        await backend.train(model, [await group(model, 0, 1)])
        with pytest.raises(ValueError, match="no trajectory"):
            await model.train_sft([])
        chosen = art.TrainSFTConfig(learning_rate=[1e-3, 1e-4], batch_size=8)
        await model.train_sft([tuning] * 8, chosen)  # with the further conversation of each: two updates
        result = await backend.train(model, [await group(model, 0, 1)])
        assert result.step == 3
        checkpoints = backend.run_dir(model) / "checkpoints" / "own" / "main" / MODEL
        manifests = [manifest(checkpoints / f"step-{n:08}") for n in (1, 2, 3)]
        assert [m["event"]["parent"] for m in manifests] == [f"{MODEL}@{n}" for n in (0, 1, 2)]
        assert [m["config"]["loss"]["type"] for m in manifests] == ["cispo", "sft", "cispo"]
        assert manifests[1]["event"]["metrics"]["updates"] == 2
        assert manifests[1]["event"]["metrics"]["learning_rate"] == 1e-4
        joined = LocalBackend(path=str(tmp_path))  # as a later program
        assert await joined.url_of(model) == await backend.url_of(model)
        await joined.close()
        assert await model.get_step() == 3, "an installation that was joined keeps running"
        (process,) = backend._started.values()
    assert process.returncode is not None, "one that was started ends with its backend"


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def test_a_group_with_exceptions_is_read_back() -> None:
    group = art.TrajectoryGroup([art.Trajectory(reward=1.0), RuntimeError("x")])
    again = art.TrajectoryGroup.model_validate_json(group.model_dump_json())
    assert again.exceptions == group.exceptions
    assert [t.reward for t in again] == [1.0]
