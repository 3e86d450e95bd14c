"""What outside models answered is in no step's gradient, whatever the log says of it."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.events import ExchangeRecorded, decode, encode
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
