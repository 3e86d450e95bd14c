"""The inputs of a vision-language model for the images of a layout, as its own image processor computes them.
`trainer.engine.forward` gives them to the trunk, and the learner checks each run's images with them.

The recorded prompt holds a placeholder for each feature of each image: copies of the model's image token, which its
trunk replaces by the features. Models whose processor returns the grid of each image (Qwen-VL) and models with a fixed
number of features for every image (Gemma 3, LLaVA) are supported.

Shape letters as in `trainer.batches.packing`.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from pipeline.telemetry.logs import get_logger

logger = get_logger("trainer.engine.images")

_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow opens further ones with programs and stubs that files of strangers should not reach."""
_REMEMBERED = 256_000_000
"""Bytes of processed images that are kept in memory: the runs of a group have the same images, and a step reads them in
several passes."""


class ImageUnusableError(ValueError):
    """Images that don't fit the tokens of their sequence, or a file that is no image."""


class ImageInputs:
    """Processes images as the base model's folder says."""

    def __init__(self, processor: Any, token: int, merge: int, fixed: int) -> None:
        """`token`: id of the placeholder; `merge`: side of the squares of patches that a processor with grids merges
        into one feature; `fixed`: number of features of an image where the processor has no grids."""
        self._processor, self.token, self._merge, self._fixed = processor, token, merge, fixed
        self._processed: OrderedDict[bytes, dict[str, torch.Tensor]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # groups are checked while a step is computed

    def check(self, ids: npt.NDArray[np.int32], images: Sequence[bytes]) -> None:
        """Raise `ImageUnusableError` unless the ids hold the placeholders of exactly these images."""
        placeholders, features, decoded = int((ids == self.token).sum()), 0, 0
        while features <= placeholders and decoded < len(images):
            # An image beyond the placeholders counts as 1 feature and is not decoded: one that the inference server did
            # not read may be large, and a request may hold hundreds.
            features += self.features(images[decoded]) if features < placeholders else 1
            decoded += 1
        if placeholders != features:
            raise ImageUnusableError(
                f"the prompt has {placeholders} places for images, and {decoded} of its {len(images)} images have "
                f"{features} features or more: the inference server processes images otherwise "
                "(`--mm-processor-kwargs` of vllm.args; put the values into preprocessor_config.json of the base "
                "model), or the request named images otherwise"
            )

    def features(self, image: bytes) -> int:
        """Return the number of placeholders of an image in a prompt. Raises `ImageUnusableError` if it can't be
        decoded."""
        grid = self._processed_image(image).get("image_grid_thw")
        return self._fixed if grid is None else int(grid.prod()) // self._merge**2

    def inputs(self, ids_RL: torch.Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, torch.Tensor]:
        """Return the model's further inputs for rows of ids, `images[r]` being the images of row r. Images whose
        placeholders the row does not hold, because nothing that is trained follows them, are left out."""
        used: list[dict[str, torch.Tensor]] = []
        for row_L, of_row in zip(ids_RL, images, strict=True):
            placeholders = int((row_L == self.token).sum())
            for image in of_row:
                if placeholders <= 0:
                    break
                placeholders -= self.features(image)
                used.append(self._processed_image(image))
        if not used:
            return {}
        joined = {name: torch.cat([image[name] for image in used]).to(ids_RL.device) for name in used[0]}
        # 1 where a token stands for an image: Qwen-VL's positions and Gemma 3's attention need it.
        types_RL = (ids_RL == self.token).to(torch.int32)
        return joined | {"mm_token_type_ids" if "image_grid_thw" in joined else "token_type_ids": types_RL}

    def _processed_image(self, image: bytes) -> dict[str, torch.Tensor]:
        """Return the tensors that the processor makes of an image, by name. They are kept in memory, up to
        `_REMEMBERED` bytes of the latest images. Raises `ImageUnusableError`."""
        key = hashlib.sha256(image).digest()
        with self._lock:
            if key not in self._processed:
                try:
                    inputs = self._processor(images=[_open(image)], return_tensors="pt")
                except Exception as error:  # decoders raise errors of any kind about files of strangers
                    raise ImageUnusableError(f"an image can't be decoded: {error}") from error
                self._processed[key] = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
                self._bytes += _size(self._processed[key])
                while self._bytes > _REMEMBERED and len(self._processed) > 1:
                    self._bytes -= _size(self._processed.popitem(last=False)[1])
            self._processed.move_to_end(key)
            return self._processed[key]


def _open(image: bytes) -> Image.Image:
    """Decode a file as vLLM does: turned as its EXIF data says, and with white behind what is transparent."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(image), formats=_FORMATS))
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        whole = upright.convert("RGBA")
        white = Image.new("RGB", whole.size, (255, 255, 255))
        white.paste(whole, mask=whole.split()[3])
        return white
    return upright.convert("RGB")


def _size(inputs: dict[str, torch.Tensor]) -> int:
    """Return the bytes of an image's tensors."""
    return sum(value.nbytes for value in inputs.values())


def image_inputs_of(base: str, config: Any) -> ImageInputs | None:
    """Return the image inputs of the base model in the folder or of the hub name `base`, whose configuration is
    `config`. `None` for a model without vision, and for one whose images are not supported, which is logged."""
    vision, token = getattr(config, "vision_config", None), getattr(config, "image_token_id", None)
    if vision is None or token is None:
        return None
    merge = getattr(vision, "spatial_merge_size", 0)
    fixed = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None) or 0
    try:
        processor = AutoImageProcessor.from_pretrained(base)
    except (ImportError, OSError, ValueError) as error:
        logger.warning("runs with images are not trained: no image processor", model=base, error=str(error)[:300])
        return None
    if not merge and not fixed:
        logger.warning("runs with images are not trained: the features of an image are not known", model=base)
        return None
    return ImageInputs(processor, int(token), int(merge or 1), int(fixed))
