"""The judge of what happened next on a log: whole runs, history judged again, and judges that die."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from judge.commands.rejudge import Rejudge
from judge.rewards.compose import open_composer_on_log
from pipeline.config import Config, JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import Hint
from pipeline.log.broker import Broker
from tests.judge.kit import exchange, groups, judging
from tests.judge.test_feedback import run
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
