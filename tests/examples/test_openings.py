"""The demo's training openings."""

from __future__ import annotations

from examples.tictactoe.agent import Finished
from examples.tictactoe.demo import CURRICULUM_POOL, Openings, parse_args
from examples.tictactoe.game import opening_seed


def test_each_group_has_a_new_opening_or_one_of_a_pool() -> None:
    new, pool = (Openings(parse_args(flags)) for flags in ([], ["--openings", "3"]))
    assert [new.choose(n) for n in range(4)] == [opening_seed("train", n) for n in range(4)]
    assert [pool.choose(n) for n in range(4)] == [opening_seed("train", n) for n in (0, 1, 2, 0)]


def test_a_curriculum_prefers_openings_with_different_rewards() -> None:
    openings = Openings(parse_args(["--curriculum"]))
    chosen = [openings.choose(n) for n in range(CURRICULUM_POOL)]
    assert len(set(chosen)) == CURRICULUM_POOL
    mixed = opening_seed("train", 5)
    for opening in chosen:
        rewards = (1.0, 0.0) * 6 if opening == mixed else (1.0,) * 12
        openings.record(opening, [Finished("id", "group", "win", reward, 3) for reward in rewards])
    counts = dict.fromkeys(chosen, 0)
    for n in range(2000):
        opening = openings.choose(n)
        counts[opening] += 1
        openings.record(opening, [Finished("id", "group", None, 0.0, 0)])  # nobody answered
    assert max(counts, key=counts.__getitem__) == mixed
