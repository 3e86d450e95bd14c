"""Models in Qwen3's shapes with random weights, made on the measuring machine: nothing is downloaded.

Speed and memory depend on shapes only. The head (in the small models also the embedding) has weights large enough
for logits with a standard deviation of about 3, as in trained models. Otherwise all logprobs would be nearly equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}t2 {{ m['content'] }} t3 {% endfor %}{% if add_generation_prompt %}t4 {% endif %}"
)
_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4b": _QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8b": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The published configurations of Qwen3-0.6B, -4B and -8B."""
BYTES = {"0.6b": 1.2e9, "4b": 8.1e9, "8b": 16.4e9}
"""Bytes of the weights in bfloat16."""
_TINY = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
"""Sizes that replace those of the shape with `--tiny`."""


def make(size: str, folder: Path, *, tiny: bool, device: str) -> str:
    """Write a model of shape `size`, with a tokenizer of one word per id. An existing model is kept. Returns the
    folder."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    done = folder / "made.json"
    made = {"size": size, "tiny": tiny}
    if done.exists() and json.loads(done.read_text()) == made:
        return str(folder)
    config = Qwen3Config(
        **SHAPES[size] | (_TINY if tiny else {}), bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    kept = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(kept)
    with torch.no_grad():
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=3 / config.hidden_size**0.5)
        # Where head and embedding are one, a token would predict itself with certainty: its own embedding is what is
        # left of it at the end. Random signs of the last norm hide it from the head.
        torch.nn.init.normal_(model.model.norm.weight)
    model.save_pretrained(folder)
    words = {f"t{n}": n for n in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t5"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="t0",
        eos_token="t1",
        unk_token="t5",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    done.write_text(json.dumps(made))
    return str(folder)
