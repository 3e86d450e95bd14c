"""The language model from a package."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.common import packaged


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_packaged_model_is_a_language_model(tmp_path: Path) -> None:
    """Its numbers arrive in the right places: it finds a sentence likelier than the same words in another order. Two
    programs that make it at once both get it."""
    folder = tmp_path / "smollm2"
    try:
        with ThreadPoolExecutor() as threads:
            assert set(threads.map(packaged.make, [folder, folder])) == {folder}
    except subprocess.CalledProcessError as error:
        if "download" not in error.cmd:
            raise
        pytest.skip("the packages can't be downloaded")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for text in ("The capital of France is the city of Paris.", "Paris France the of capital city is the of The."):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    assert losses[0] + 1.0 < losses[1]
    assert model.dtype == torch.float32
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert packaged.make(folder) == folder  # it is there already
    assert list(tmp_path.iterdir()) == [folder]
