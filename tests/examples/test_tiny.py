"""Tokenizers and losses of the examples' base models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from trainer import tiny

WORDS = [" cat", " dog", "Write two words."]


def test_a_word_is_one_token_and_any_text_survives() -> None:
    tokenizer = tiny.make_tokenizer(WORDS)
    assert len(tokenizer(" cat dog").input_ids) == 2
    assert len(tokenizer("Write two words.").input_ids) == 1
    for text in (" cat dog", "a cats", "naïve ☃", "Write two words. dog"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.slow
def test_pretraining_learns_the_teachers_distribution_and_the_model_can_be_loaded(tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer(WORDS)
    model = tiny.make_model(tokenizer, 0, width=64, mlp=64, layers=1)
    chat: tiny.Chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " cat"}]

    def loss_of(_: int) -> torch.Tensor:
        return tiny.choice_loss(model, tokenizer, WORDS[:2], [(chat, [[0.25, 0.75]])])

    before = loss_of(0).item()
    tiny.pretrain(model, loss_of, 60)
    assert before > 1
    assert 0 <= loss_of(0).item() < 0.05
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    tiny.save(model, tokenizer, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert not (tmp_path / "model" / "old").exists()
