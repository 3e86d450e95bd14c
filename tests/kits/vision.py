"""Tiny random vision-language models with their image processors and a tokenizer of bytes."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from tests.kits.environments import packages

IMAGE, VIDEO, END_OF_TURN = "<|image_pad|>", "<|video_pad|>", "<|im_end|>"
START, END = "<|vision_start|>", "<|vision_end|>"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", END_OF_TURN, START, END, IMAGE, VIDEO]
VOCABULARY = {token: i for i, token in enumerate([*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_SIZES = {"hidden_size": 64, "intermediate_size": 128}
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
_TOKENS = {"bos_token_id": None, "eos_token_id": VOCABULARY[END_OF_TURN], "pad_token_id": 0}
_TEXT = _SIZES | _HEADS | _TOKENS | {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": len(VOCABULARY)}
_TEXT |= {"max_position_embeddings": 2048, "tie_word_embeddings": True}
_QWEN_TEXT = _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}}
_VISION = _SIZES | {"patch_size": 14}
_QWEN_VISION = _VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
_CLIP_VISION = _VISION | _HEADS | {"image_size": 56}
_QWEN = {
    "image_token_id": VOCABULARY[IMAGE],
    "video_token_id": VOCABULARY[VIDEO],
    "vision_start_token_id": VOCABULARY[START],
    "vision_end_token_id": VOCABULARY[END],
    "text_config": _QWEN_TEXT,
}
_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _QWEN | {"vision_config": _QWEN_VISION | {"window_size": 56, "fullatt_block_indexes": [1]}},
    "qwen2_vl": _QWEN | {"vision_config": _QWEN_VISION | {"embed_dim": 64, "mlp_ratio": 2}},
    "qwen3_vl": _QWEN
    | {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}},
    "gemma3": {
        "text_config": _TEXT | {"sliding_window": 16},
        "vision_config": _CLIP_VISION,
        "mm_tokens_per_image": 4,
        "image_token_id": VOCABULARY[IMAGE],
        "image_token_index": VOCABULARY[IMAGE],
        "boi_token_index": VOCABULARY[START],
        "eoi_token_index": VOCABULARY[END],
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "image_token_id": VOCABULARY[IMAGE],
        "image_seq_length": 16,
        "vision_config": _CLIP_VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
    },
}
_COLORS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_IMAGES = _COLORS | {"size": {"height": 56, "width": 56}}
_QWEN_IMAGES = _COLORS | {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_544}
_QWEN_IMAGES |= {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": _IMAGES | {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 4},
    "llava": _IMAGES | {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 56, "width": 56}},
}
KINDS = tuple(_CONFIGURATIONS)
QUESTION = "which color?"


def make_vision_model(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0) -> str:
    """Write a model into `folder`, which vLLM can serve too, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    processor = _PROCESSORS.get(kind, _QWEN_IMAGES)
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **_CONFIGURATIONS[kind])
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=_SPECIAL[0],
        additional_special_tokens=_SPECIAL,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(processor | {"video_processor_type": "Qwen2VLVideoProcessor"})
    )
    return str(folder)


def make_guesser(folder: Path, letters: Sequence[str]) -> str:
    """Write a model that answers `QUESTION` with one of `letters`, whatever an image shows, and return the folder."""
    base = make_vision_model(folder)
    model = AutoModelForImageTextToText.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    rows = torch.tensor([[*ids, VOCABULARY[letter], VOCABULARY[END_OF_TURN]] for letter in letters])
    labels = rows.clone()
    labels[:, : len(ids)] = -100
    optimizer = torch.optim.AdamW(model.model.language_model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(base)
    return base


def picture(color: tuple[int, int, int], width: int = 56, height: int = 56) -> bytes:
    """Return a PNG file of one color."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


_DECLARE = '''
"""torchvision's operators are compiled for CUDA. Those that it describes when it is imported are declared, so that it
can be imported; image processors use none of them."""
import sys


class _Declare:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _Declare())
'''


def torchvision() -> Path:
    """Return a folder for PYTHONPATH in which `torchvision` can be imported beside a CPU build of torch."""
    folder = packages("vision")
    (folder / "sitecustomize.py").write_text(_DECLARE)
    return folder
