"""The judge of what happened next on a log: whole runs, history judged again, and judges that die."""

from __future__ import annotations

import signal as signals
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from judge.commands.rejudge import Rejudge
from judge.rewards.compose import open_composer_on_log
from pipeline import streams
from pipeline.config import Config, JudgeConfig, NatsConfig, RewardConfig, save
from pipeline.events import DeadLettered, GroupScored, Hint
from pipeline.log.broker import Broker
from tests.judge.kit import exchange, groups, judging
from tests.judge.test_feedback import run, signal
from tests.kits.crash.processes import fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.scoring_server import ScoringServer

pytestmark = pytest.mark.anyio

SAID = ("Thanks!", "No, you should have looked in the other drawer.", "exit code 0")
"""What follows the calls 0 to 2 of a run. Nothing follows call 3."""
CALLS = {"0": 1.0, "1": -1.0, "2": 1.0}
HINT = Hint(call=1, text="looked in the other drawer.")


async def play(broker: Broker, name: str, **ended: Any) -> None:
    """A run of four calls by a client that sends the conversation back with each."""
    messages: list[dict[str, str]] = [{"role": "user", "content": f"task of {name}"}]
    for seq, said in enumerate((*SAID, "")):
        request = msgspec.json.encode({"messages": messages})
        await broker.publish(msgspec.structs.replace(exchange(name, f"r{seq}", seq=seq), request=request))
        messages += [{"role": "assistant", "content": f"r{seq}"}, {"role": "user", "content": said}]
    await broker.publish(run(name, exchanges=len(SAID) + 1, **ended))


def settings(nats: NatsConfig, server: ScoringServer, *others: RewardConfig, votes: int = 3) -> Config:
    rewards = (RewardConfig(name="next", kind="next_state", votes=votes), *others)
    judge = JudgeConfig(min_size=1, model="openai/scorer", api_base=server.url, rewards=rewards)
    return Config(project="p", nats=nats, judge=judge)


async def test_a_single_run_has_rewards_of_calls_and_hints_of_the_judge_and_of_people(
    nats_config: NatsConfig,
) -> None:
    own = RewardConfig(name="result", kind="feedback", default=0.5)
    async with ScoringServer().run() as server, Broker.connect(nats_config) as broker:
        async with judging(broker, settings(nats_config, server, own)):
            await broker.publish(signal("a", 0.25, call=1))
            await broker.publish(signal("a", call=2, kind="text", text="Well done."))
            await play(broker, "a")
            (group,) = await groups(broker, 1)
        assert server.calls == 3
    (member,) = group.members
    assert (member.reward, member.components) == (0.5, {"result": 0.5, "next": pytest.approx(1 / 3)})
    assert member.call_rewards == {"0": 1.0, "1": -0.75, "2": 1.0}
    assert member.hints == (HINT, Hint(call=2, text="Well done.", by="desk"))
    votes = [v for v in group.verdicts if v.rubric == "next_state"]
    assert [[(s.call, s.score) for s in v.scores] for v in votes] == [[(0, 1.0), (1, -1.0), (2, 1.0)]] * 3
    assert votes[0].scores[1].hint == HINT.text
    assert votes[0].scores[1].explanation


async def test_history_is_judged_by_what_happened_next_on_a_branch_once(nats_config: NatsConfig) -> None:
    async with ScoringServer().run() as server, Broker.connect(nats_config) as broker:
        async with judging(broker, Config(project="p", nats=nats_config, judge=JudgeConfig(min_size=1))):
            for name in ("a", "b"):
                await play(broker, name, reward=1.0)
            await groups(broker, 2)
        config = settings(nats_config, server, votes=1)
        for number in range(2):
            async with open_composer_on_log(config, broker) as composer:
                report = await Rejudge(broker, config, composer, branch="next").run()
            assert (report.rejudged, report.skipped) == ((2, 0), (0, 2))[number]
            assert server.calls == 2
        members = [m for g in await groups(broker, 4) if g.branch == "next" for m in g.members]
    assert [(m.reward, m.call_rewards, m.hints) for m in members] == [(0.0, CALLS, (HINT,))] * 2


POINTS = ("judge.before_publish", "votes")
"""Where a judge dies; `votes`: while the judge model has its questions. test_matrix.py has the other points."""
RUNS = 4


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_each_call_is_rewarded_once_whenever_a_judge_dies(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(0.5, endless=True))
    deaths = Counter[str]()
    async with (
        ScoringServer().run() as model,
        Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker,
    ):
        config = msgspec.structs.replace(settings(nats_config, model), run_dir=str(tmp_path))
        save(config, tmp_path / "judge.toml")
        async with fork_server(
            tmp_path / "judge.toml", "judge", "openai.resources.chat", ack_wait_s=0.5
        ) as server:
            for point in POINTS:
                model.delay_s = 60.0 if point == "votes" else 0.0
                before = model.calls
                dying = server.start("judge", f"{point}:1" if point != "votes" else "")
                for number in range(RUNS):
                    await play(broker, f"{point.replace('.', '-')}-{number}")
                with anyio.fail_after(60):
                    if point == "votes":
                        while model.calls == before:
                            await anyio.sleep(0.02)  # the server can only be asked
                        await dying.end(signals.SIGKILL)
                    await dying.ended.wait()
                assert dying.status == -signals.SIGKILL, point
                deaths[point] += 1
                model.delay_s = 0.0
                heir = server.start("judge")
                with anyio.fail_after(60):
                    while len(await broker.read(GroupScored)) < RUNS * len(deaths) or await broker.lag(
                        "judge"
                    ):
                        await anyio.sleep(0.05)
                await heir.end(signals.SIGKILL)
        scored = [r.event for r in await broker.read(GroupScored)]
        assert await broker.read(DeadLettered) == []
    names = [f"{point.replace('.', '-')}-{number}" for point in POINTS for number in range(RUNS)]
    assert Counter(m.trajectory for g in scored for m in g.members) == Counter(names)
    assert all((m.call_rewards, m.hints) == (CALLS, (HINT,)) for g in scored for m in g.members)
    assert all(len(g.verdicts) == 3 for g in scored)
