"""Events that make an alarm hold, and what is recorded of alarms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio

from pipeline.config import Config
from pipeline.events import AlarmChanged, Event, JudgeMeasured, now_us
from pipeline.log.broker import Broker
from store.alarms.checker import create_measured_tables, evaluate
from store.alarms.table import ALARMS
from store.reading import sql
from tests.kits.events import letter, loaded
from tests.store import kit
from tests.store.kit import checkpoint

BY_NAME = {alarm.name: alarm for alarm in ALARMS}
STEPS, GROUPS = 4, 6
SETTINGS = {"steps": STEPS, "groups": GROUPS}
"""Short windows, so that the tests need few events."""
AGO_US = 600_000_000
REPLICA = "10.0.0.1:8000"


def steps(metric: str, values: list[float], **more: Any) -> list[Event]:
    """A step for each value of `metric`, all published ten minutes ago."""
    at = now_us() - AGO_US
    return [checkpoint(i, metrics={metric: value}, at=at, **more) for i, value in enumerate(values, 1)]


def groups(equal: int, different: int, **more: Any) -> list[Event]:
    """Groups with equal rewards, then groups with different ones."""
    rewards = [(0.5, 0.5)] * equal + [(0.0, 1.0)] * different
    return [kit.scored(f"g{i}", {f"g{i}-0": a, f"g{i}-1": b}, **more) for i, (a, b) in enumerate(rewards)]


def discarded(reason: Literal["stale", "no_variance"], count: int) -> list[Event]:
    """The trainer's discards of the first groups."""
    return [kit.discarded(f"g{i}", reason, f"g{i}-0", f"g{i}-1") for i in range(count)]


def measured(kind: str, **values: Any) -> list[Event]:
    """A measurement of the judge."""
    return [JudgeMeasured(**({"project": "p", "kind": kind, "judge": "j", "model": "x", "ruler": "default"} | values))]


def anchors(tau: float | None, alarm: bool = False) -> list[Event]:
    """A measurement against the anchors."""
    return measured("anchors", kendall_tau=tau, alarm=alarm)


def letters(count: int, reason: str = "undecodable", consumer: str = "judge", ago_us: int = 0) -> list[Event]:
    """Dead letters of one consumer."""
    return [letter(i, consumer=consumer, reason=reason, at=now_us() - ago_us) for i in range(count)]


def loads(*held: int, replica: str = REPLICA, server_start: str = "", ago_us: int = 0) -> list[Event]:
    """Versions that a process of a replica loaded."""
    process = {"replica": replica, "server_start": server_start}
    return [loaded(step, at=now_us() - ago_us, **process) for step in held]


def passes(failed: int, made: int, ago_us: int = 0) -> list[Event]:
    """What a judge says of its last passes."""
    failure = "the reply could not be read 4 times" if failed else ""
    return measured("groups", recent_passes=made, recent_failed=failed, failure=failure, at=now_us() - ago_us)


def unrewarded(count: int) -> list[Event]:
    """Groups that were discarded for want of rewards."""
    why = "2 of 2 trajectories carry no reward and judge.model is not set"
    return [kit.discarded(f"u{i}", "too_small", f"u{i}-0", f"u{i}-1", by="judge", detail=why) for i in range(count)]


def costs(usd: float, step_s: float, sampled: int) -> list[Event]:
    """A verdict, a step, and a run."""
    said = kit.verdict({"a": 1.0}, cost_usd=usd / 2)
    steps = checkpoint(1, metrics={"step_s": step_s})
    return [kit.scored("g", {}, verdicts=(said, said)), steps, kit.completed("t", sampled_tokens=sampled)]


LEVEL = [1.0] * 2 * STEPS


def cases() -> Mapping[str, tuple[list[Event], list[Event]]]:
    """For each alarm, events with which it holds and events with which it does not. Call it when the test runs: several
    queries look at the last minutes only."""
    return {
        "kl_rise": (steps("kl", [0.1, 5.0, 5.0, 5.0, 5.0]), steps("kl", [9.0, 9.0, 9.0, 9.0, 9.0])),
        "sampler_mismatch": (steps("sampler_logprob_diff", [1e-6, 0.2]), steps("sampler_logprob_diff", [1e-6, 1e-6])),
        "over_judge_budget": (costs(5.0, 1.0, 10), costs(4.99, 9999.0, 9999)),
        "over_gpu_budget": (costs(0.1, 3600.0, 10), costs(9.0, 3599.0, 9999)),
        "over_token_budget": (costs(0.1, 1.0, 1000), costs(9.0, 9999.0, 999)),
        "judge_drift": (anchors(0.9) + anchors(0.2), anchors(0.2) + anchors(0.9)),
        "judge_failing": (passes(0, 40, AGO_US) + passes(8, 8), passes(8, 8, AGO_US) + passes(3, 8)),
        "not_learning": (unrewarded(3), unrewarded(3) + groups(0, 1)),
        "dead_letters": (letters(1), letters(1, ago_us=7_200_000_000)),
        "log_full": ([], []),
        "store_behind": ([], []),
        "file_damaged": ([], []),
        "replica_behind": (steps("kl", LEVEL) + loads(1, 2), steps("kl", LEVEL) + loads(1, 2 * STEPS)),
    }


async def changes(broker: Broker, count: int = 0) -> list[AlarmChanged]:
    """Every change on the log, once there are `count`."""
    with anyio.fail_after(60):
        while len(found := [r.event for r in await broker.read(AlarmChanged)]) < count:
            await anyio.sleep(0.02)
    return found


def conditions(
    config: Config, name: str, events: list[Event], measured: tuple[Sequence[Any], ...] = ((),)
) -> list[AlarmChanged]:
    """The conditions of an alarm that hold in a run, to whose history these events are added. `measured`: what
    `create_measured_tables` takes."""
    folder = Path(config.run_dir)
    kit.fill(folder, *events)
    (folder / "store").mkdir(parents=True, exist_ok=True)
    with sql.connect(config) as connection:
        create_measured_tables(connection, config, *measured)
        return evaluate(connection, config, BY_NAME[name])
