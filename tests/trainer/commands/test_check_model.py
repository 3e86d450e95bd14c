"""`journeywork check-model`: whether a base trains right here."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pipeline.commands.main import SUBCOMMANDS
from tests.trainer.families import make
from trainer.commands import check_model


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = 0
    try:
        check_model.main(list(arguments))
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, capsys.readouterr().out


def test_a_model_that_trains_right(tiny_base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert SUBCOMMANDS["check-model"][0] == "trainer.commands.check_model"
    code, out = asked(capsys, tiny_base, "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0
    assert found["refused"] is None
    assert 0 <= found["padded_difference"] < 1e-4
    assert 0 <= found["packed_difference"] < 1e-4
    assert (found["layout"], found["dtype"]) == ("prefix", "float32")
    code, text = asked(capsys, tiny_base)
    assert code == 0
    assert "trains right" in text


def test_a_missing_chat_template_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path)
    assert "no chat template" in asked(capsys, str(tmp_path))[1]
    vocabulary = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, chat_template="{{ messages }}").save_pretrained(tmp_path)
    assert "no chat template" not in asked(capsys, str(tmp_path))[1]


def test_a_model_with_a_state_is_trained_in_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = asked(capsys, make("qwen3_5_text", tmp_path), "--json")
    found = json.loads(out)
    assert (code, found["refused"], found["layout"], found["packed_difference"]) == (0, None, "padded", None)
    code, out = asked(capsys, str(tmp_path), "--json", "--set", "trainer.memory.packing=prefix")
    found = json.loads(out)
    assert code == 1
    assert "carry a state" in found["refused"]
    assert found["padded_difference"] < 1e-4


def test_a_model_that_can_not_be_loaded_is_refused_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    code, out = asked(capsys, str(tmp_path), "--json")
    assert code == 1
    assert "no_such_family" in json.loads(out)["refused"]
    assert asked(capsys, str(tmp_path), "--set", "trainer.nonsense=1")[0] == 2


def test_a_missing_folder_gets_the_same_error_as_from_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_model.main(["/nope"])
    assert "model: there is no folder '/nope'; expected one with the base model" in capsys.readouterr().err
