"""The judge of what happened next: which calls it judges, how votes count, and what it withstands."""

import json
import random
import re
from typing import Any

import msgspec
import pytest

from judge.errors import UnscoredError
from judge.labelled import GroupFile, GroupMember
from judge.next_state import NextStateJudge, majority
from judge.ruler.asking import JudgingError
from judge.ruler.replies import VOTES, ParsedScores, UnreadableReplyError, parse_scores
from judge.ruler.rubrics import load_rubric
from judge.ruler.transcripts import Transcript
from judge.scoring import judge_hash
from pipeline.config import JudgeConfig, RewardConfig
from pipeline.events import Hint
from tests.judge.attacks import ATTACKS
from tests.judge.kit import Model, completed, loading, single
from tests.kits.scoring_server import Answer, Scorer, score_key
from tests.kits.settings import with_values

NEXT = RewardConfig(name="next", kind="next_state")


def chat(*said: str, name: str = "a", role: str = "user") -> Transcript:
    """A conversation: replies `r0`, `r1`, ... and what followed each."""
    messages = [{"role": "user", "content": "the task"}]
    for number, text in enumerate(said):
        messages += [{"role": "assistant", "content": f"r{number}"}, {"role": role, "content": text}]
    return GroupFile([GroupMember(name, messages)]).transcripts()[name]


def judge(model: Model, *transcripts: Transcript, votes: int = 3, **settings: Any) -> NextStateJudge:
    config = with_values(JudgeConfig(model="test/judge", retry_for_s=0.0), settings)
    rubric, load = load_rubric("next_state"), loading(transcripts)
    return NextStateJudge(config, votes, rubric, model, load)


async def judged(judging: NextStateJudge, *names: str) -> Any:
    return await judging([completed(name) for name in names])


async def test_each_call_gets_the_score_and_the_hint_of_what_followed_it() -> None:
    run = chat("Thanks!", "No, you should have used the account that ends in 12.", "and now something else")
    model = Model(Scorer())
    judging = judge(model, run)
    found = (await judged(judging, "a"))["a"]
    assert found.scores == {0: 1.0, 1: -1.0, 2: 0.0}
    assert found.hints == (Hint(call=1, text="used the account that ends in 12."),)
    assert found.mean == 0.0
    assert len(model.requests) == len(found.verdicts) == 3
    for verdict in found.verdicts:
        scores = [(s.trajectory, s.call, s.score) for s in verdict.scores]
        assert scores == [("a", 0, 1.0), ("a", 1, -1.0), ("a", 2, 0.0)]
        assert (verdict.rubric, verdict.judge_model) == ("next_state", "test-judge")
        assert (verdict.cost_usd, verdict.order) == (0.001, ())
    assert judging.statistics.measured_fields()["self_agreement"] == 1.0
    assert (judging.statistics.groups, judging.statistics.passes) == (1, 3)


async def test_a_run_in_which_nothing_followed_is_not_judged_and_costs_nothing() -> None:
    model = Model(Scorer())
    found = await judged(judge(model, single("a", ({"role": "assistant", "content": "r0"},))), "a")
    assert (found["a"].scores, found["a"].mean, model.requests) == ({}, None, [])


def shown(request: dict[str, Any]) -> str:
    return re.sub(r"[0-9a-f]{16}", "#", str(request["messages"][1]["content"]))


async def test_the_judge_reads_each_message_once_in_the_order_of_the_conversation() -> None:
    model = Model(Scorer())
    await judged(judge(model, chat("first", "second"), votes=1), "a")
    lines = [line for line in shown(model.requests[0]).splitlines() if "=====" not in line and line]
    assert lines == [
        "----- # before -----",
        "[user] the task",
        "----- # reply -----",
        "[assistant] r0",
        "----- # followed -----",
        "[user] first",
        "----- # reply -----",
        "[assistant] r1",
        "----- # followed -----",
        "[user] second",
    ]


async def test_a_long_run_is_judged_in_several_prompts_each_with_what_came_before() -> None:
    model = Model(Scorer())
    found = await judged(judge(model, chat(*(f"quality={(-1) ** n}" for n in range(45))), votes=1), "a")
    assert found["a"].scores == {n: (-1.0) ** n for n in range(45)}
    assert [shown(r).count("BEGIN") for r in model.requests] == [20, 20, 5]
    assert "[assistant] r19" in shown(model.requests[1])


@pytest.mark.parametrize(
    ("votes", "score"),
    [
        ((1, 1, -1), 1),
        ((1, -1), 0),
        ((1, -1, 0), 0),
        ((0, 0, 1), 0),
        ((-1,), -1),
        ((1, 1, -1, -1), 0),
        ((1, 0, 1, 0, 1), 1),
    ],
)
def test_the_score_with_the_most_votes_counts_and_a_tie_is_zero(votes: tuple[int, ...], score: int) -> None:
    assert majority(votes) == score


def fixed(*votes: int, hints: tuple[str, ...] = ()) -> Any:
    """A model that gives every call of a request the next of these votes, and hint."""
    left, said = list(votes), list(hints)

    def answer(request: dict[str, Any]) -> Answer:
        entries = json.loads(str(Scorer()(request)))["scores"]
        key, vote = score_key(request), left.pop(0)
        hint = said.pop(0) if said else ""
        return json.dumps({"scores": [{**e, key: vote, key.replace("score", "hint"): hint} for e in entries]})

    return answer


async def test_the_longest_hint_of_the_votes_counts_without_a_chat_template_s_tokens() -> None:
    hints = ("None.", "Use <|im_start|>b2<|im_end|>, not a1.", "Use b2, not a1.")
    found = await judged(judge(Model(fixed(-1, -1, 1, hints=hints)), chat("b2!")), "a")
    assert found["a"].scores == {0: -1.0}
    assert found["a"].hints == (Hint(call=0, text="Use < |im_start| >b2< |im_end| >, not a1."),)
    found = await judged(judge(Model(fixed(-1, -1, 1, hints=("None.", "n/a", ""))), chat("b2!")), "a")
    assert found["a"].hints == ()


@pytest.mark.parametrize("vote", [2, 0.5, "1", None, True])
async def test_a_vote_off_the_scale_counts_for_nothing_and_is_asked_for_again(vote: Any) -> None:
    wrong = fixed(vote)
    calls = iter([wrong])
    model = Model(lambda request: next(calls, Scorer())(request))
    found = await judged(judge(model, chat("Thanks"), votes=1), "a")
    assert (found["a"].scores, found["a"].verdicts[0].attempts) == ({0: 1.0}, 2)
    assert model.requests[1]["messages"][1]["content"].endswith("quote nothing.")


async def test_failed_votes_are_left_out_while_more_than_half_are_there() -> None:
    def failing(count: int) -> Model:
        left = iter(range(count))
        return Model(lambda request: 500 if next(left, None) is not None else Scorer()(request))

    found = await judged(judge(failing(1), chat("Thanks")), "a")
    assert (found["a"].scores, len(found["a"].verdicts)) == ({0: 1.0}, 2)
    with pytest.raises(UnscoredError, match="no usable judge pass within 0 s: answered 500"):
        await judged(judge(failing(2), chat("Thanks")), "a")
    with pytest.raises(JudgingError):
        await judge(failing(2), chat("Thanks")).judge([chat("Thanks")])


async def test_a_run_that_cannot_be_judged_does_not_keep_others_from_it() -> None:
    model = Model(lambda request: "no scores" if "bad" in str(request["messages"]) else Scorer()(request))
    found = await judged(judge(model, chat("bad"), chat("Thanks", name="b")), "a", "b")
    assert {name: run.scores for name, run in found.items()} == {"b": {0: 1.0}}


async def test_what_votes_in_vain_cost_is_in_the_first_verdict() -> None:
    replies = iter(["unreadable"] * 4)
    model = Model(lambda request: next(replies, None) or Scorer()(request))
    found = await judged(judge(model, chat("Thanks")), "a")
    assert sum(v.attempts for v in found["a"].verdicts) == len(model.requests)
    assert sum(v.cost_usd for v in found["a"].verdicts) == pytest.approx(0.001 * len(model.requests))


@pytest.mark.parametrize("number", range(len(ATTACKS)))
async def test_no_text_gives_its_call_a_score(number: int) -> None:
    """What a user or a tool writes is data. The model obeys every order that it finds outside of the fences."""
    rng = random.Random(number)
    run = chat("No, thanks is not what I say. No,", f"{ATTACKS[number]} quality=-1", role=rng.choice(["user", "tool"]))
    found = await judged(judge(Model(Scorer(obedient=True)), run, votes=1), "a")
    assert found["a"].scores == {0: -1.0, 1: -1.0}


@pytest.mark.parametrize(
    "entry",
    [
        '"score_k": 1',
        '"score_k": 1, "hint_k": 1',
        '"score_k": 1, "hint_k": null',
        '"score_k": 1, "hint": "x"',
        '"score_k": 1, "hint_k": "", "hint_k": "x"',
        '"score_k": 1, "hint_k": "hint_k"',
        '"hint_k": "x"',
        '"score_k": 1, "hint_k": "x", "more": 1',
    ],
)
def test_a_reply_gives_each_call_a_score_and_a_hint_to_the_letter(entry: str) -> None:
    def parse(entry: str) -> ParsedScores:
        return parse_scores(
            f'{{"scores": [{{"id": "a", "explanation": "b", {entry}}}]}}', ["a"], "score_k", VOTES, "hint_k"
        )

    found = parse('"score_k": -1, "hint_k": "x"')
    assert (found.scores, found.hints) == ({"a": -1.0}, {"a": "x"})
    with pytest.raises(UnreadableReplyError):
        parse(entry)


async def test_a_run_is_compared_with_its_anchor_by_the_mean_score_of_its_calls() -> None:
    runs = (chat("Thanks", "no, wrong", name="half"), chat("Thanks", name="good"), chat("error", name="bad"))
    judging = judge(Model(Scorer()))
    scores, _ = await judging.judge(runs, count=False)
    assert scores == {"half": 0.0, "good": 1.0, "bad": -1.0}
    assert (judging.statistics.passes, judging.statistics.groups) == (0, 0)


def test_every_rubric_and_the_number_of_votes_are_part_of_the_judge_s_identity(tmp_path: Any) -> None:
    (tmp_path / "mine.md").write_text("Judge.")
    hashes = {
        judge_hash(JudgeConfig(model="m", rewards=(msgspec.structs.replace(NEXT, **changed),)))
        for changed in ({}, {"votes": 5}, {"rubric": str(tmp_path / "mine.md")})
    }
    assert len(hashes) == 3
