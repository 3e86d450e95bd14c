"""The images of judged trajectories, shown to the judge model behind the text of a call.

In the text an image stands as `(image 1f0c…)`, with a name made of its bytes. Each image that a call's text names is
attached once, so an image that a group's attempts share costs its tokens once a call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from judge.ruler.transcripts import Transcript
from pipeline.chat.images import image_name, image_of

_NAMED = re.compile(r"\(image ([0-9a-f]{16})\)")


def attach_images(
    messages: Sequence[dict[str, Any]], transcripts: Sequence[Transcript], most: int
) -> list[dict[str, Any]]:
    """Return the messages of a call, with the images of `transcripts` that the last message names attached to it. Only
    the first `most` of them are; 0: none."""
    *before, last = messages
    named = dict.fromkeys(_NAMED.findall(last["content"]))
    if not named or not most:
        return list(messages)
    parts = {image_name(image): part for part, image in _images(transcripts)}
    content: list[dict[str, Any]] = [{"type": "text", "text": last["content"]}]
    for name in [name for name in named if name in parts][:most]:
        content += [
            {"type": "text", "text": f"Image {name}:"},
            {"type": "image_url", "image_url": parts[name]["image_url"]},
        ]
    return [*before, {**last, "content": content}] if len(content) > 1 else list(messages)


def _images(transcripts: Sequence[Transcript]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each image in the messages of transcripts: the part of the message that holds it, and its bytes."""
    for transcript in transcripts:
        for conversation in transcript.conversations:
            for message in conversation.messages:
                parts = message.get("content")
                for part in parts if isinstance(parts, list) else ():
                    if isinstance(part, dict) and (image := image_of(part)) is not None:
                        yield part, image
