"""The committed tokenizer and model: what capture, prefix caching and training rely on."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

from examples.tictactoe.agent import MAX_TOKENS
from examples.tictactoe.game import CELLS, Game, describe, free_cells
from examples.tictactoe.make_model import ILLEGAL, MODEL_DIR, STRONG, make_tokenizer, prospects, taught_game, teach
from trainer.tiny import choice_loss, make_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def test_the_committed_tokenizer_is_what_the_script_makes(tokenizer: Any) -> None:
    made = make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template


def test_the_committed_model_has_the_shape_that_the_script_makes(tokenizer: Any) -> None:
    made, config = make_model(tokenizer, 0).config.to_dict(), AutoConfig.from_pretrained(MODEL_DIR).to_dict()
    differ = {key for key in made if made[key] != config.get(key)}
    assert differ <= {"architectures", "_name_or_path", "transformers_version"}


@pytest.mark.slow
def test_the_committed_model_imitates_the_teacher(tokenizer: Any) -> None:
    """How well it knows the teacher bounds what it can be trained to, so a worse base must not slip in."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL_DIR)
    with torch.no_grad():
        divergence = choice_loss(model, tokenizer, CELLS, [taught_game(f"test/{number}") for number in range(200)])
    assert 0 < divergence.item() < 0.05


def test_model_is_small_and_float32() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "np") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118 - no mapping
    assert dtypes == {"F32"}
    assert sum(file.stat().st_size for file in Path(MODEL_DIR).iterdir()) < 8_000_000


def test_every_prompt_extends_the_one_before_and_its_reply_token_for_token(tokenizer: Any) -> None:
    for number in range(30):
        game, chat, before = Game(f"any/{number}"), [], []
        while game.result is None:
            chat.append({"role": "user", "content": describe(game.board)})
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert prompt[: len(before)] == before
            move = CELLS[free_cells(game.board)[-1]]
            sampled = tokenizer.convert_tokens_to_ids([move])
            assert len(sampled) == MAX_TOKENS
            text = tokenizer.decode(sampled, skip_special_tokens=True)
            assert text == move
            before = prompt + sampled
            assert len(prompt) <= 68
            chat.append({"role": "assistant", "content": text})
            game.play(text)


def test_a_turn_is_one_token_a_cell(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": describe("xo.......")}]
    assert len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) == 12


def test_the_teacher_knows_and_rarely_does() -> None:
    board = "xx.oo...."  # c1 wins, c2 blocks
    share = dict(zip(CELLS, teach(board), strict=True))
    assert sum(share.values()) == pytest.approx(1)
    assert share["c1"] == pytest.approx(STRONG)
    assert share["c2"] == 0
    assert sum(share[c] for c in ("a1", "b1", "a2", "b2")) == pytest.approx(ILLEGAL)
    assert max(prospects(board).values()) == 1
    assert prospects("." * 9)[4] < max(prospects("." * 9).values()) < 1  # corners are worth more than the centre
    for marks in itertools.islice(itertools.product("xo.", repeat=9), 0, 19683, 97):
        if "." in marks:
            assert sum(teach("".join(marks))) == pytest.approx(1)
