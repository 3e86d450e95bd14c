"""Runs with images: what of the record reaches the model, for each kind of vision-language model."""

import dataclasses
import io
import json
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.chat.images import Media, media_of
from tests.kits.vision import KINDS, data_url, make_vision_model, picture
from tests.trainer.kit import exchange, settings, stir
from trainer.batches.examples import Example
from trainer.batches.packing import padded
from trainer.engine.engine import Engine
from trainer.engine.images import ImageUnusableError, _open
from trainer.engine.verify import image_sequences
from trainer.sequences import TokenSequence, build

RED, BLUE = picture((255, 0, 0)), picture((0, 0, 255), 84)


def asking(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_images_have_the_models_own_logprobs(kind: str, tmp_path: Path) -> None:
    base = make_vision_model(tmp_path / kind, kind)
    engine = Engine(base, settings(base, tmp_path, logprob_bound=1e-3).trainer)
    difference = engine.passes.verified.images
    assert difference is not None
    assert difference.largest < 1e-4
    assert engine.model.images is not None
    stir(engine)
    # Another image gives other logprobs, and no layer of the vision tower has an adapter.
    first, *_ = image_sequences(engine.model.images, engine.model.vocabulary)
    other = dataclasses.replace(first, images=(picture((0, 255, 0)),))
    with torch.no_grad():
        logprobs_SK = engine.model.logprobs(padded([first, other]), (2, first.trained_tokens))[0]
    assert float((logprobs_SK[0] - logprobs_SK[1]).abs().max()) > 1e-2
    assert not any("vision" in name or "visual" in name for name in engine.model.weights())


def test_images_must_fit_the_tokens(tmp_path: Path) -> None:
    base = make_vision_model(tmp_path)
    engine = Engine(base, settings(base, tmp_path).trainer)
    images = engine.model.images
    assert images is not None
    ids = np.array([7, *[images.token] * 4, 8, *[images.token] * 6, 9], np.int32)
    images.check(ids, [RED, BLUE])
    for wrong in ([RED], [RED, RED], [BLUE, BLUE], []):
        with pytest.raises(ImageUnusableError, match="10 places for images"):
            images.check(ids, wrong)
    with pytest.raises(ImageUnusableError, match="can't be decoded"):
        images.check(ids, [b"no image"])
    # Pillow has a SyntaxError for data that go on in a chunk without a name.
    broken = RED[:33] + chunk(b"IDAT", RED[41:61]) + chunk(b"\n\n\n\n", b"")
    with pytest.raises(ImageUnusableError, match="can't be decoded: broken PNG"):
        images.check(ids, [broken])
    # What exceeds the places is not decoded: a request may name images that the inference server did not read.
    with pytest.raises(ImageUnusableError, match="10 places for images"):
        images.check(ids, [RED, BLUE, *[b"no image"] * 600])
    # A row that ends before the second image needs the first alone.
    sequence = TokenSequence.made_up("t", np.array([*ids, 9]), 12)
    cut = dataclasses.replace(sequence, loss_mask=np.arange(14) == 6, images=(RED, BLUE))
    layout = padded([cut, dataclasses.replace(sequence, images=(RED, BLUE))])
    assert images.inputs(layout.ids_RL, layout.images)["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4], [1, 4, 6]]
    example = Example(sequence, 1.0)
    assert engine.passes.packing_of([example, example], [0, 0]) == "prefix"
    assert engine.passes.packing_of([example, Example(cut, 1.0)], [0, 0]) == "padded"


def test_media_of_a_request() -> None:
    assert media_of(asking(image(data_url(RED)), {"type": "text", "text": "?"}, image(data_url(BLUE)))) == Media(
        (RED, BLUE)
    )
    escaped = asking(image(data_url(RED))).replace(b"image_url", b"image\\u005furl")
    assert media_of(escaped) == Media((RED,))
    assert media_of(asking({"type": "image_url", "image_url": data_url(RED)})) == Media((RED,))
    for part in (
        image("https://example.com/a.png"),
        image("data:image/png;base64,%%"),
        image("data:image/png,x"),
        image("data:image/png;base64,é"),
        {"type": "image_url", "uuid": "1"},
    ):
        assert media_of(asking(part)) == Media(unusable="image_url")
    assert media_of(asking({"type": "input_audio", "input_audio": {"data": ""}})) == Media(unusable="input_audio")
    for text in (
        b"no json",
        b'{"messages": 3, "a_url": 1}',
        b'[{"image_url": 1}]',
        b'{"a_url": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        asking({"type": "text", "text": "image_url"}),
    ):
        assert media_of(text) == Media()


def test_calls_whose_media_are_not_in_the_record_are_context() -> None:
    left_out: Counter[str] = Counter()
    calls = [
        exchange("a", 0, [2, 3], [4, 5], request=asking(image("https://example.com/a.png"))),
        exchange("a", 1, [6, 3], [4, 5], request=asking(image(data_url(RED)))),
    ]
    (sequence,) = build("a", calls, left_out=left_out)
    assert sequence.images == (RED,)
    assert left_out == {"image_url": 2}


def test_prompts_with_the_same_tokens_and_other_images_are_sequences_of_their_own() -> None:
    red, blue = (asking(image(data_url(file))) for file in (RED, BLUE))
    both = asking(image(data_url(RED)), image(data_url(BLUE)))
    calls = [
        exchange("a", 0, [2, 3], [4], request=red),
        exchange("a", 1, [2, 3, 4, 6], [5], request=blue),
        exchange("a", 2, [2, 3, 4, 7], [5], request=both),
    ]
    assert [(s.ids.tolist(), s.images) for s in build("a", calls)] == [
        ([2, 3, 4, 7, 5], (RED, BLUE)),
        ([2, 3, 4, 6, 5], (BLUE,)),
    ]


def test_files_are_decoded_as_vllm_does() -> None:
    """Turned by their EXIF data, with white behind what is transparent."""
    turned, clear = io.BytesIO(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 2)).save(turned, "PNG", exif=exif)
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(clear, "PNG")
    assert _open(turned.getvalue()).size == (2, 4)
    assert _open(clear.getvalue()).getpixel((0, 0)) == (255, 255, 255)
