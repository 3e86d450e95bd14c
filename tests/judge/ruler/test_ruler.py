"""RULER against a scorer in the same process: matching, asking again, orders, subsets, failures."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from judge.errors import UnscoredError
from judge.ruler import prompt
from judge.ruler.asking import JudgingError
from tests.judge.kit import TOO_LONG, Model, completed, ruler, transcript
from tests.kits.scoring_server import Answer, Scorer, score_key

QUALITY = {f"t{i}": round(0.1 + i / 10, 2) for i in range(6)}
TRANSCRIPTS = [transcript(n, f"I play. quality={q}") for n, q in QUALITY.items()]


def per_call(*answers: Callable[[dict[str, Any]], Answer]) -> Callable[[dict[str, Any]], Answer]:
    """Each call its own answer, the last for all that follow."""
    left = list(answers)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0])(request)


def without_first(request: dict[str, Any]) -> str:
    said = json.loads(str(Scorer()(request)))["scores"]
    return json.dumps({"scores": said[1:]})


async def test_each_trajectory_gets_its_own_score() -> None:
    judge = ruler(Model(Scorer()))
    scores, verdicts = await judge.judge(TRANSCRIPTS)
    assert scores == pytest.approx(QUALITY)
    assert len(verdicts) == 2
    for verdict in verdicts:
        assert {s.trajectory: s.score for s in verdict.scores} == pytest.approx(QUALITY)
        names = (verdict.judge_model, verdict.rubric, verdict.rubric_hash)
        assert names == ("test-judge", "general", judge.rubric.hash)
        cost = (verdict.prompt_tokens, verdict.completion_tokens, verdict.cost_usd, verdict.latency_s)
        assert cost == (100, 10, 0.001, 0.05)
        assert all(s.explanation for s in verdict.scores)
    assert verdicts[0].order != verdicts[1].order


async def test_judging_the_same_history_again_uses_the_same_orders_and_new_ids() -> None:
    first, second = Model(Scorer()), Model(Scorer())
    _, a = await ruler(first).judge(TRANSCRIPTS)
    _, b = await ruler(second).judge(TRANSCRIPTS)
    assert [v.order for v in a] == [v.order for v in b]
    assert first.requests[0]["messages"] != second.requests[0]["messages"]


async def test_a_single_trajectory_can_be_judged_too() -> None:
    judge = ruler(Model(Scorer()))
    assert (await judge.judge(TRANSCRIPTS[:1]))[0] == pytest.approx({"t0": 0.1})
    found = judge.statistics.measured_fields()
    assert (found["self_agreement"], found["position_bias"]) == (None, None)  # there was nothing to compare


def in_tens(request: dict[str, Any]) -> str:
    key, said = score_key(request), json.loads(str(Scorer()(request)))["scores"]
    return json.dumps({"scores": [{**entry, key: round(entry[key] * 10)} for entry in said]})


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (without_first, " times, for 6 ids"),
        (in_tens, "it has a score that is not from 0 to 1"),
        (lambda _: "", " stands in it 0 times, for 6 ids"),
    ],
)
async def test_a_reply_that_cannot_be_read_is_asked_for_again_with_the_reason(
    first: Callable[[dict[str, Any]], Answer], why: str
) -> None:
    model = Model(per_call(first, Scorer()))
    judge = ruler(model, passes=1)
    scores, (verdict,) = await judge.judge(TRANSCRIPTS)
    assert scores == pytest.approx(QUALITY)
    assert (verdict.attempts, verdict.prompt_tokens, judge.statistics.asked_again) == (2, 200, 1)
    before, after = (request["messages"] for request in model.requests)
    assert before[0] == after[0]
    assert after[1]["content"].removeprefix(before[1]["content"]).startswith("\n\nYour first answer could not")
    assert why in after[1]["content"]


async def test_a_failed_pass_is_tried_again_before_the_other_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pass, the first position's bonus of 0.3 stays in the scores of a new judge."""
    monkeypatch.setattr("judge.ruler.asking._FIRST_PAUSE_S", 0.01)
    for failing in ([429], ["no"], [429, 429, "no"]):
        model = Model(per_call(Scorer(first_bonus=0.3), *(lambda _, a=a: a for a in failing), Scorer(first_bonus=0.3)))
        judge = ruler(model, attempts=1)
        scores, verdicts = await judge.judge(TRANSCRIPTS)
        assert [len(verdicts), judge.statistics.failed_judgings] == [2, len(failing)]
        both = [scores[verdict.order[0]] - QUALITY[verdict.order[0]] for verdict in verdicts]
        assert max(both) < 0.2
        # What the unreadable replies cost is in the verdicts.
        spent = judge.statistics.usage
        assert sum(v.cost_usd for v in verdicts) == pytest.approx(spent.cost_usd)
        assert sum(v.attempts for v in verdicts) == spent.calls == 2 + failing.count("no")


async def test_one_pass_counts_alone_if_no_other_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("judge.ruler.asking._FIRST_PAUSE_S", 0.01)
    judge = ruler(Model(per_call(Scorer(), lambda _: "no")), attempts=1)
    scores, (verdict,) = await judge.judge(TRANSCRIPTS)
    assert scores == pytest.approx(QUALITY)
    assert (verdict.attempts, judge.statistics.failed_judgings) == (6, 5)


async def test_without_a_usable_reply_the_group_is_unscored() -> None:
    with pytest.raises(JudgingError, match="could not be read"):
        await ruler(Model(lambda _: "no"), attempts=2).judge(TRANSCRIPTS)
    with pytest.raises(JudgingError, match="answered 503"):
        await ruler(Model(lambda _: 503)).judge(TRANSCRIPTS)
    judge = ruler(Model(lambda _: 503), TRANSCRIPTS, retry_for_s=0.1)
    with pytest.raises(UnscoredError, match="no usable judge pass within 0 s: answered 503"):
        await judge([completed(n) for n in QUALITY])


async def test_a_group_is_scored_once_the_model_answers_again() -> None:
    judge = ruler(Model(per_call(lambda _: 503, lambda _: 503, Scorer())), TRANSCRIPTS)
    scores, _ = await judge([completed(n) for n in QUALITY])
    assert scores == pytest.approx(QUALITY)


async def test_a_bonus_of_0_3_for_the_first_position_is_removed_from_the_scores() -> None:
    judge = ruler(Model(Scorer(first_bonus=0.3)))
    for number in range(30):
        truth = {f"g{number}-{i}": 0.1 + i / 10 for i in range(6)}
        scores, _ = await judge.judge([transcript(n, f"quality={q:.1f}") for n, q in truth.items()])
    off = [scores[n] - truth[n] for n in truth]
    assert max(off) - min(off) < 0.05  # 0.15 as it comes
    assert judge.statistics.bias.first_position_effect() == pytest.approx(0.3, abs=0.06)


async def test_a_long_shared_beginning_is_counted_and_sent_once() -> None:
    """Eight members with 20,000 characters in common once took three to six calls."""
    shared = "The manual of the game. " * 800 + "\nWin the game."
    truth = {f"t{i}": round(0.1 + i / 10, 2) for i in range(8)}
    group = [transcript(n, f"I play. quality={q}", task=shared) for n, q in truth.items()]
    model = Model(Scorer())
    scores, verdicts = await ruler(model, context_tokens=12_000, passes=1).judge(group)
    assert scores == pytest.approx(truth)
    assert (len(verdicts), verdicts[0].left_out) == (1, 0)
    text = str(model.requests[0]["messages"])
    assert text.count("The manual of the game.") == 800
    assert not any(re.search(rf"\b{name}\b", text) for name in truth)  # a trajectory's own id is never shown


async def test_text_that_does_not_fit_is_cut_and_counted_in_the_verdict() -> None:
    group = [transcript(f"t{i}", f"{i}" * 50_000, f"quality=0.{i + 1}") for i in range(3)]
    model = Model(Scorer())
    scores, (verdict,) = await ruler(model, context_tokens=10_000, passes=1).judge(group)
    assert scores == pytest.approx({f"t{i}": (i + 1) / 10 for i in range(3)})
    size = sum(len(m["content"]) for m in model.requests[0]["messages"])
    assert size <= 10_000 * prompt.BYTES_PER_TOKEN
    assert verdict.left_out > 150_000 - size
    assert "bytes left out" in str(model.requests[0]["messages"])


async def test_context_tokens_are_halved_until_the_model_takes_the_prompt() -> None:
    """A judge model with a smaller context than `judge.context_tokens` refuses the prompt; the next one is half as
    long."""

    def answer(request: dict[str, Any]) -> Answer:
        size = sum(len(m["content"]) for m in request["messages"])
        return TOO_LONG if size > 30_000 else Scorer()(request)

    group = [transcript(f"t{i}", f"{i}" * 20_000, f"quality=0.{i + 1}") for i in range(4)]
    model = Model(answer)
    judge = ruler(model, context_tokens=40_000, passes=1)
    scores, _ = await judge.judge(group)
    assert scores == pytest.approx({f"t{i}": (i + 1) / 10 for i in range(4)})
    assert len(model.requests) == 3
    await judge.judge(group)
    assert len(model.requests) == 4  # what was learned once is known
    with pytest.raises(JudgingError, match="too long"):
        await ruler(Model(lambda _: TOO_LONG), passes=1).judge(group)


async def test_a_reply_that_was_cut_off_is_an_error_that_names_the_setting() -> None:
    model = Model(lambda _: '{"scores": [' + " " * 100_000, cut_off=True)
    with pytest.raises(JudgingError, match=r"cut off after 10 tokens \(judge\.request\.max_tokens\)"):
        await ruler(model, attempts=2, passes=1).judge(TRANSCRIPTS)
