"""The images of a recorded call: the bytes that its request holds as `data:` URLs.

A call with other media can't be computed again from its record: an image that the inference server fetched from a URL
or had in its cache, audio, or video.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

_OTHER_MEDIA = ("audio_url", "input_audio", "video_url")
_HINTS = (b'_url"', b'_audio"', b"\\u")
"""Bytes without which no request holds media; a name may be written with escapes."""


class Media(NamedTuple):
    """What the messages of a request hold besides text."""

    images: tuple[bytes, ...] = ()
    """The images' files, in the order of the prompt."""
    unusable: str = ""
    """Name of a field with media that the record does not hold, or that are no images; `images` is empty then. Empty if
    there are none."""


def media_of(request: bytes) -> Media:
    """Return the media of a request body (JSON). A body that can't be decoded holds none."""
    if not any(hint in request for hint in _HINTS):
        return Media()
    try:
        body = msgspec.json.decode(request)
    except (msgspec.DecodeError, RecursionError):
        return Media()
    images: list[bytes] = []
    for part in _parts(body):
        if other := next((name for name in _OTHER_MEDIA if part.get(name)), ""):
            return Media(unusable=other)
        if "image_url" in part or part.get("type") == "image_url":
            image = image_of(part)
            if image is None:
                return Media(unusable="image_url")
            images.append(image)
    return Media(tuple(images))


def image_of(part: dict[str, Any]) -> bytes | None:
    """Return the bytes of the image in a part of a message; `None` if the part has no `data:` URL of one, such as for
    text, other media and images at another URL."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return None
    head, _, data = url.partition(",")
    try:
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else None
    except ValueError:  # no base64, or not even ASCII
        return None


def image_name(image: bytes) -> str:
    """Return a name for an image's file: the beginning of its SHA-256."""
    return hashlib.sha256(image).hexdigest()[:16]


def _parts(body: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages of a request whose content is a list."""
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from (part for part in (content if isinstance(content, list) else ()) if isinstance(part, dict))
