"""What outside models answered is in no step's gradient, whatever the log says of it."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import Config, OutsideConfig
from pipeline.events import ExchangeRecorded, decode, encode
from pipeline.names import outside_model, outside_version
from tests.trainer.batches.test_histories import asked, with_hints
from tests.trainer.kit import exchange
from trainer.sequences import build

calls = st.lists(
    st.tuples(
        st.sampled_from(["tiny@0", "tiny@3", "outside:master", "outside:tiny@3", "outside:"]),
        st.sampled_from(["complete", "failed"]),
        st.booleans(),
    ),
    max_size=8,
)


@given(calls)
def test_no_token_of_an_outside_model_trains(told: Sequence[tuple[str, Any, bool]]) -> None:
    """Also where a faulty gateway recorded tokens with such a call. Token 1000 + n was sampled by call n."""
    log, prompt = [], [5]
    for number, (version, status, goes_on) in enumerate(told):
        prompt = [*prompt, 6] if goes_on else [7, number]
        event = exchange("t", number, prompt, [1000 + number], policy_version=version, status=status)
        log.append(decode(encode(event)))
        prompt = [*prompt, 1000 + number]
    events = [event for event in log if isinstance(event, ExchangeRecorded)]
    trained = [int(token) for s in build("t", events) for token in s.ids[s.loss_mask]]
    own = [
        1000 + number
        for number, (version, status, _) in enumerate(told)
        if status == "complete" and not version.startswith("outside:")
    ]
    assert sorted(trained) == own


@pytest.mark.parametrize("may", [True, False])
def test_best_run_that_an_outside_model_answered_is_shown_where_it_may_train(tmp_path: Any, may: bool) -> None:
    best = [asked("best", 0, policy_version="outside:master")]
    taught = with_hints(tmp_path, best, 0, None, may_train=lambda version: may)
    assert (taught.hints, taught.hints_unused, list(taught.teacher_prompts)) == (1, 1 - may, ["worse"] * may)


@pytest.mark.parametrize(
    ("permitted", "may"), [((True,), True), ((False,), False), ((True, False), False), ((), False)]
)
def test_all_tables_of_a_name_must_permit_it(permitted: tuple[bool, ...], may: bool) -> None:
    tables = tuple(OutsideConfig(name="master", url="http://x/v1", may_train=p) for p in permitted)
    config = Config(outside=(*tables, OutsideConfig(name="other", url="http://x/v1", may_train=not may)))
    assert config.may_train(outside_version("master")) is may
    assert config.may_train("master@3")
    assert outside_model("outside:a:b") == "a:b"
