from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import trl_trainers
from trainer.trl_trainers import plain_logprobs, trl_imports

with trl_imports():
    from trl import SFTConfig, SFTTrainer


def test_on_a_cpu_only_trained_tokens_have_logits(
    tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    plain = trl_trainers._PlainLogprobs.apply

    def counting(hidden: torch.Tensor, *rest: object) -> object:
        scored.append(len(hidden))
        return plain(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(trl_trainers._PlainLogprobs, "apply", staticmethod(counting))
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, -100, 8, 9]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no")
    with plain_logprobs("cpu"):
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(tiny_base),
        )
        batch = trainer.data_collator([trainer.train_dataset[n] for n in range(2)])
        loss = trainer.compute_loss(trainer.model, dict(batch))
    assert scored == [3]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss, theirs)


def test_a_trl_without_the_name_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.15, which the GPU lock has."""
    with trl_imports():
        from trl.trainer import utils
    monkeypatch.delattr(utils, "_use_triton")
    fused = utils._ChunkedLogProbFunction
    with plain_logprobs("cpu"):
        assert utils._ChunkedLogProbFunction is trl_trainers._PlainLogprobs
    assert utils._ChunkedLogProbFunction is fused
    assert not hasattr(utils, "_use_triton")
