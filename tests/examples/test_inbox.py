"""The demo's messages, its reward, and what it tells on the way."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.common.running import fast_bfloat16
from examples.inbox import report
from examples.inbox.agent import Sorter
from examples.inbox.demo import EXAMPLES_FROM, parse_args
from examples.inbox.messages import ORDERS, PROBLEMS, URGENCIES, message, right_fields
from examples.inbox.ways import GROUPS_PER_STEP, MESSAGES, way_of

PARTS = [*PROBLEMS.values(), *URGENCIES.values(), ORDERS]


def test_no_sentence_is_both_trained_and_held_out() -> None:
    trained = {sentence for part in PARTS for sentence in part["train"]}
    held_out = {sentence for part in PARTS for sentence in part["held_out"]}
    assert not trained & held_out
    assert sum(len(part[split]) for part in PARTS for split in ("train", "held_out")) == len(trained | held_out)


def test_messages_go_through_all_teams_and_urgencies() -> None:
    assert len({(m.team, m.urgency) for m in (message("train", 5 + number) for number in range(12))}) == 12


def test_seeds_draw_other_training_messages_and_the_same_held_out_ones() -> None:
    assert message("train", 3, 0).text != message("train", 3, 1).text
    assert message("held_out", 3, 0) == message("held_out", 3, 1)
    assert (parse_args([]).steps + 1) * GROUPS_PER_STEP < MESSAGES < EXAMPLES_FROM  # no example is a training message


def test_words_belong_to_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--words", "--way", "judge"])
    assert "--words needs --way job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ('{"team":"billing","urgency":"high","order":1234}', (1, 1, 1)),
        ('{"order": 1234, "urgency": "high", "team": "billing"}', (1, 1, 1)),
        ('{"team":"sales","urgency":"high","order":1234}', (0, 1, 1)),
        ('{"team":"billing","urgency":"high","order":"1234"}', (1, 1, 0)),
        ('{"team":"billing"}', (1, 0, 0)),
        ('{"team":"billing"', (0, 0, 0)),
        ("billing high 1234", (0, 0, 0)),
        ("[" * 100_000, (0, 0, 0)),
    ],
)
def test_a_field_counts_if_it_is_right(answer: str, right: tuple[int, ...]) -> None:
    said = message("train", 0)
    said = type(said)(said.id, said.text, "billing", "high", 1234)
    fields = right_fields(said, answer)
    assert (fields["team"], fields["urgency"], fields["order"]) == right
    assert fields["solved"] == float(all(right))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_any_answer_has_its_fields_counted(answer: object) -> None:
    assert set(right_fields(message("train", 0), json.dumps(answer)).values()) <= {0.0, 1.0}


def test_the_right_answer_is_right() -> None:
    for number in range(100):
        said = message("held_out", number)
        assert set(right_fields(said, said.right).values()) == {1.0}


@pytest.mark.parametrize(("answer", "score"), [("{right}", 1.0), ("Sure! {right}", 0.0), ('{"team":"sales"}', 0.0)])
def test_the_stand_in_judge_scores_as_the_reward_does(answer: str, score: float) -> None:
    args = parse_args(["--seed", "3"])
    said = next(m for m in (message("train", number, 3) for number in range(9)) if m.team != "sales")
    with way_of("judge", args) as way, httpx.Client() as client:
        context = f"=== BEGIN {'0' * 16} context ===\n[user]\n{said.text}\n=== END {'0' * 16} context ===\n"
        attempt = f"=== BEGIN {'1' * 16} trajectory a ===\n[assistant]\n{answer.replace('{right}', said.right)}\n"
        messages = [
            {"role": "system", "content": '"score_x"'},
            {"role": "user", "content": f"{context}{attempt}=== END {'1' * 16} trajectory a ===\n"},
        ]
        url = f"{way.settings['judge.api_base']}/chat/completions"
        reply = client.post(url, json={"model": "stand-in", "messages": messages}).raise_for_status().json()
    assert json.loads(reply["choices"][0]["message"]["content"])["scores"][0]["score_x"] == score
    assert way.settings["judge.rubric"].endswith("rubric.md")


def test_progress_shows_the_curve_and_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    sorter = Sorter()
    sorter.solved[1] += [0.0, 0.0]
    sorter.solved[2] += [1.0, 1.0]
    shown = message("held_out", 0)
    sorter.answers[shown.id] = {"inbox@0": "hello", "inbox@2": shown.right}
    report.show_progress(sorter, 2, 41)
    report.show_answers(sorter, ["inbox@0", "inbox@2"])
    printed = capsys.readouterr().out
    assert "step 2/41" in printed
    assert "▁█" in printed
    assert printed.count("✓") == 1


def test_whether_bfloat16_is_fast_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, fast in (
        ("flags : avx2 avx512_bf16 sse", True),
        ("flags : avx2 sse\n", False),
        ("Features : bf16\n", True),
    ):
        monkeypatch.setattr("pathlib.Path.read_text", lambda *_, flags=flags: flags)
        assert fast_bfloat16() is fast
