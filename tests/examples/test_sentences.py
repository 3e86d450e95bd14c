"""The reward function of the sentences, and the tokens of their tasks."""

from __future__ import annotations

import pytest

from examples.common.running import ROOT
from examples.sentences.make_model import make_tokenizer, taught
from examples.sentences.reward import keeps_rules, score
from examples.sentences.tasks import WORDS, task
from pipeline.config import load

TASK = "Write 4 words. Use: fish. Avoid the letter: e. No word twice."


@pytest.mark.parametrize(
    ("sentence", "reward"),
    [
        (" fish sing by night", 1.0),
        ("Fish sing by night.", 1.0),
        (" fish sing", 1 - 0.5 / 4),  # two words are missing
        (" birds sing by night", 1 - 1 / 4),
        (" fish swim here now", 1 - 0.25 / 4),  # one of four words has the letter
        (" fish fish fish fish", 1 - 1 / 4),
        ("", 0.0),
        ("!", 0.0),
    ],
)
def test_each_rule_has_its_share(sentence: str, reward: float) -> None:
    assert score(TASK, sentence) == pytest.approx(reward)


def test_a_task_of_another_form_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a task of this example"):
        score("Write a poem.", "Roses are red.")


def test_the_judge_gives_the_runs_messages() -> None:
    messages = [{"role": "user", "content": TASK}, {"role": "assistant", "content": " fish sing by night"}]
    assert keeps_rules({"messages": messages}) == 1
    assert keeps_rules({"messages": [messages[0], {"role": "assistant", "content": None}]}) == 0


def test_a_task_can_be_solved_and_is_three_tokens() -> None:
    tokenizer = make_tokenizer()
    for number in range(100):
        asked = task(f"any/{number}")
        assert len(tokenizer(asked).input_ids) == 3
        letter = asked.partition("letter: ")[2][0]
        assert sum(letter not in word for word in WORDS) >= 6
    assert task("held-out/1") == task("held-out/1") != task("held-out/2")


def test_the_teacher_sometimes_keeps_all_rules() -> None:
    rewards = [score(*(message["content"] for message in taught(f"any/{number}"))) for number in range(500)]
    assert 0.2 < sum(reward == 1 for reward in rewards) / len(rewards) < 0.4
    assert 0.6 < sum(rewards) / len(rewards) < 0.85
    assert max(len(make_tokenizer()(taught(f"any/{n}")[1]["content"]).input_ids) for n in range(50)) <= 6


def test_the_settings_of_tiny_models_are_valid() -> None:
    load(ROOT / "examples" / "common" / "two_cores.toml", ['models.0.name="m"', 'models.0.base="b"'])
