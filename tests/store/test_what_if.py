"""What if: the question as it is asked, and one from the question to the dashboard's page."""

import contextlib
from pathlib import Path

import anyio
import openai
import pytest

from examples.tictactoe.agent import play as play_game
from journeywork import AsyncJourneywork, Trajectory
from pipeline.config import Config, ConfigError, DistillConfig, ModelConfig, TeacherConfig, TrainerConfig, load, save
from pipeline.running.installations import SETTINGS
from store.commands.question import Question, read_question
from store.commands.what_if import _parser
from store.showing.pages.history import History
from store.showing.pages.what_if import what_if
from tests.conftest import VllmServer
from tests.kits.installation import JOURNEYWORK, ROOT, SMALL, program, started
from tests.kits.settings import with_values

GAMES = ["--rollout", "examples.tictactoe.held_out:play", "--scenarios", "examples.tictactoe.held_out:batches"]
WINS, HURRY = (str(ROOT / "examples" / "tictactoe" / "what_if" / f"{name}.toml") for name in ("wins", "hurry"))


def asked(run_dir: Path, *flags: str, run: Config | None = None) -> Question:
    config = run or Config(run_dir=str(run_dir), models=(ModelConfig(name="m"),))
    save(config, run_dir / SETTINGS)
    return read_question(_parser().parse_args([*flags, "--rollout", "a:b", "--scenarios", "c:d"]), config)


def test_each_rubric_and_each_file_is_a_branch_with_the_settings_of_all(tmp_path: Path) -> None:
    rubric = tmp_path / "stricter.md"
    rubric.write_text("Be strict.")
    flags = ["--rubric", str(rubric), "--with", WINS, "--set", "trainer.loss.beta=0.01"]
    question = asked(tmp_path, *flags, "--since", "2026-11-20T01:00+01:00", "--where", "task = 'a' OR true")
    by_name = {plan.name: plan for plan in question.plans}
    assert by_name["stricter"].settings == {"trainer.loss.beta": "0.01", "judge.rubric": str(rubric)}
    assert by_name["wins"].settings["judge.rewards"] == [{"name": "win", "kind": "metric"}]
    assert all(plan.judged for plan in question.plans)
    assert "decided_at >= TIMESTAMP '2026-11-20 00:00:00' AND (task = 'a' OR true)" in question.selection
    assert asked(tmp_path, *flags).plans != question.plans  # other groups: other branches
    rubric.write_text("Be stricter.")
    again = asked(tmp_path, *flags, "--since", "2026-11-20", "--where", "task = 'a' OR true")
    assert again.id != question.id  # the same name, another rubric


def test_a_name_with_a_dot_is_one_name_and_the_runs_other_names_stay(tmp_path: Path) -> None:
    (tmp_path / "cool.toml").write_text('[judge.request.params."v1.5"]\nseed = 2\n')
    run = load(None, ['models=[{name="m"}]', f"run_dir={tmp_path}", "judge.model=m"])
    run = with_values(run, {"judge.request.params": {"x": {"seed": 1}}})
    (plan,) = asked(tmp_path, "--with", str(tmp_path / "cool.toml"), run=run).plans
    variant = load(tmp_path / SETTINGS, plan.overrides)
    assert variant.judge.request.params == {"x": {"seed": 1}, "v1.5": {"seed": 2}}


def test_only_settings_of_the_trainer_judge_nothing_again(tmp_path: Path) -> None:
    (plan,) = asked(tmp_path, "--set", "trainer.loss.beta=0.01", "--from", "m@3").plans
    assert (plan.name, plan.judged) == ("set", False)


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        (["trainer.distill.weight=0.5"], True),
        (["models.0.trainer.distill.weight=0.5"], True),
        (['models.0.trainer={distill={weight=0.5, teacher="outside"}}'], True),
        (["teacher.model=bigger", "trainer.distill.weight=0.5"], True),
        (["teacher.model=bigger"], False),  # nothing learns from it
        (["trainer.distill.weight=0.5", "trainer.distill.teacher=base"], False),  # the trainer has this teacher
    ],
)
def test_the_judge_asks_the_teacher_of_a_variant(tmp_path: Path, settings: list[str], judged: bool) -> None:
    """Whether the groups of a variant are judged again, where its teacher answers."""
    run = Config(
        run_dir=str(tmp_path),
        models=(ModelConfig(name="m"),),
        teacher=TeacherConfig(url="http://127.0.0.1:9/v1", model="big"),
        trainer=TrainerConfig(distill=DistillConfig(teacher="outside")),
    )
    (plan,) = asked(tmp_path, *(part for setting in settings for part in ("--set", setting)), run=run).plans
    assert plan.judged == judged


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "what is to differ"),
        (["--rubric", "strictr.md"], "there is no such file"),
        (["--set", "trainer.los=1"], "did you mean trainer.loss"),
        (["--set", "models.0.base=other"], "has main's base"),
        (["--set", 'models=[{name="m", base="other"}]'], "has main's base"),
        (["--with", WINS, "--with", WINS], "two variants have one name"),
        (["--set", "seed"], "section.key=value"),
        (["--model", "x", "--set", "trainer.seed=1"], "the run has m"),
    ],
)
def test_a_question_that_can_t_be_asked_is_refused_before_anything_runs(
    tmp_path: Path, flags: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        asked(tmp_path, *flags)


async def play(url: str) -> None:
    """Games of a base model, in groups with rewards that differ."""

    async def rollout(run: Trajectory, seed: str) -> float:
        async with openai.AsyncOpenAI(**run.openai) as agent:
            await play_game(agent, run, seed)
        run.metrics["win"] = float(run.id[-1] in "01234567")  # the double never wins
        return run.metrics["win"]

    async with AsyncJourneywork(url) as client:
        groups = await client.gather("tictactoe", [f"s{i}" for i in range(12)], rollout, group_size=4)
        assert not [error for group in groups for error in group.exceptions]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_command_from_a_run_to_the_page(tmp_path: Path, inference_double: VllmServer) -> None:
    run_dir = tmp_path / "run"
    settings = [*SMALL, "judge.group_size=4", "trainer.max_steps=1", "store.flush_s=0.2"]
    config = str(ROOT / "examples" / "tictactoe" / "journeywork.toml")
    taught = tmp_path / "taught.toml"
    taught.write_text(
        f'[teacher]\nurl = "{inference_double.url}/v1"\nmodel = "{inference_double.model}@0"\n'
        '[trainer.distill]\nteacher = "outside"\nweight = 0.5\n'
    )
    variants = [part for file in (WINS, HURRY, str(taught)) for part in ("--with", file)]
    ask = [*JOURNEYWORK, "what-if", "--run-dir", str(run_dir), *variants, *GAMES, "--limit", "2"]
    flags = ["--config", config, "--run-dir", str(run_dir), "--vllm-url", inference_double.url]
    with started(tmp_path, run_dir, *flags, settings=settings) as running:
        anyio.run(play, running.url)
        running.until(lambda: running.query("SELECT count(*) AS n FROM groups")[0]["n"] >= 12)
        running.until_step(1)
        with pytest.raises(AssertionError, match="held_out' has no 'none'") as refused:
            program([*ask, "--scenarios", "examples.tictactoe.held_out:none"], ROOT)
        assert "replayed" not in str(refused.value)  # before anything is trained

    with pytest.raises(AssertionError, match="--services gateway,sampler,store"):
        program(ask, ROOT)
    with started(tmp_path, run_dir, *flags, "--services", "gateway,sampler,store", settings=settings):
        said = program(ask, ROOT)
    assert "difference" in said
    with contextlib.closing(History(Config(run_dir=str(run_dir)))) as history:
        (row,) = what_if(history, {})["rows"]
        assert history.rows("SELECT * FROM dead") == []
        assert len(history.rows("SELECT DISTINCT entrant FROM evaluations")) == 4
        learned = "SELECT metrics['tokens_taught'] AS taught FROM policy_checkpoint WHERE branch LIKE '%-taught'"
        assert history.rows(learned)[-1]["taught"] > 0
    assert (row["baseline"], row["groups"]) == ("tictactoe@1", 12)
    assert [v["branch"].rpartition("-")[2] for v in row["variants"]] == ["wins", "hurry", "taught"]
    for variant in row["variants"]:
        reward = variant["measures"][0]
        assert (reward["measure"], reward["pairs"]) == ("reward", 2)
        assert reward["difference"] is not None
        assert variant["groups"] == 4
        assert variant["version"] == f"tictactoe+{variant['branch']}@1"
        assert f"#{variant['source']}'" in said
