"""What a run may be given as its result, and what names a policy."""

import math
from typing import Any

import numpy as np
import pytest

from journeywork.trajectory import Trajectory, parse_policy


def run(**fields: Any) -> Trajectory:
    made = Trajectory("t", "m", "g", "http://gateway/v1", "key")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_numbers_of_any_kind_become_floats() -> None:
    result = run(reward=True, rewards={"style": np.float32(0.5)}, metrics={"turns": 3}).result()
    assert (result["reward"], result["rewards"], result["metrics"]) == (1.0, {"style": 0.5}, {"turns": 3.0})


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"rewards": 0.5}, TypeError, "rewards must be a dict of numbers by name, not 0.5; the reward of the run is"),
        ({"metrics": [1.0]}, TypeError, r"metrics must be a dict of numbers by name, not \[1.0\]$"),
        ({"metrics": {"a\nb": 1.0}}, ValueError, r"a name in metrics must be printable text, not 'a\\nb'"),
        ({"metrics": {1: 1.0}}, ValueError, "a name in metrics must be printable text, not 1"),
        ({"reward": math.nan}, ValueError, "reward must be finite, not nan"),
        ({"outcome": "failed"}, ValueError, "outcome must be one of scored, no_result, masked, not 'failed'"),
        ({"reward": math.inf}, ValueError, "reward must be finite, not inf"),
        ({"reward": (1.0,)}, TypeError, "reward must be a number"),
        ({"reward": "0.5"}, TypeError, "reward must be a number, not '0.5'"),
        ({"metadata": {"seen": {1, 2}}}, TypeError, "metadata must be what JSON can hold: .*set"),
        ({"metadata": {"x": math.inf}}, ValueError, "metadata must be what JSON can hold"),
    ],
)
def test_what_is_no_result_is_said_with_its_field(fields: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        run(**fields).result()


def test_a_printed_run_does_not_show_its_key() -> None:
    made = Trajectory("t", "m", "g", "http://gateway/v1", "secret")
    assert "secret" not in f"{made!r}{made}"


def test_a_policy_is_named_in_one_way() -> None:
    assert parse_policy("m") == ("m", "")
    assert parse_policy("m@12") == ("m", "m@12")
    assert parse_policy("m@base") == parse_policy("m@0") == ("m", "m@0")
    for text in ("", "@1", "m@", "m@x", "m@-1", "m@²"):
        with pytest.raises(ValueError, match="is no policy: write <model>"):
            parse_policy(text)
