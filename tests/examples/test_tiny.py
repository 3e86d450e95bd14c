"""Tokenizers and losses of the examples' base models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from trainer import tiny

WORDS = [" cat", " dog", "Write two words."]
CHAT: tiny.Chat = [
    {"role": "system", "content": "Write two words."},
    {"role": "user", "content": "Begin with a."},
    {"role": "assistant", "content": " cat dog"},
    {"role": "user", "content": "More."},
    {"role": "assistant", "content": " dog"},
]


def test_a_word_is_one_token_and_any_text_survives() -> None:
    tokenizer = tiny.make_tokenizer(WORDS)
    assert len(tokenizer(" cat dog").input_ids) == 2
    assert len(tokenizer("Write two words.").input_ids) == 1
    for text in (" cat dog", "a cats", "naïve ☃", "Write two words. dog"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_loss_of_replies_is_that_of_their_tokens_and_ends_alone() -> None:
    tokenizer = tiny.make_tokenizer(WORDS)
    model = tiny.make_model(tokenizer, 0, width=64, mlp=64, layers=1)
    short: tiny.Chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " cat"}]
    losses = []
    for chat in (CHAT, short):
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt").input_ids
        logprobs = model(ids).logits[0].log_softmax(-1)
        speaks = False
        for place, token in enumerate(ids[0].tolist()):
            if speaks:
                losses.append(-logprobs[place - 1, token])
            if token == tokenizer.convert_tokens_to_ids("<|assistant|>"):
                speaks = True
            elif token == tokenizer.eos_token_id:
                speaks = False
    assert len(losses) == 3 + 2 + 2
    found = tiny.reply_loss(model, tokenizer, [CHAT, short])  # a batch: the short one is padded
    assert found.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


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
