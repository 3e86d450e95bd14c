"""Images of trajectories, as a judge model is shown them."""

import base64
from typing import Any

from judge.ruler.transcripts import Transcript
from pipeline.chat.images import image_name
from tests.judge.kit import Model, ruler, single
from tests.kits.scoring_server import Scorer

FILES = [bytes([i]) * 1000 for i in range(4)]


def seen(name: str, *files: bytes, said: str = "") -> Transcript:
    """A run whose user shows pictures."""
    url = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "text", "text": "Look."}, *({"type": "image_url", "image_url": {"url": u}} for u in url)]
    reply = {"role": "assistant", "content": f"I see it. quality=0.5 {said}"}
    return single(name, ({"role": "user", "content": parts}, reply))


def scorer(request: dict[str, Any]) -> Any:
    last = request["messages"][-1]
    content = last["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    return Scorer()({**request, "messages": [*request["messages"][:-1], {**last, "content": text}]})


async def shown(*transcripts: Transcript, **settings: Any) -> list[str]:
    """The names of the images that a judge was shown, in one pass."""
    model = Model(scorer)
    await ruler(model, passes=1, **settings).judge(transcripts)
    content = model.requests[0]["messages"][-1]["content"]
    if isinstance(content, str):
        assert "base64" not in content
        return []
    text, *rest = content
    assert "base64" not in text["text"]
    names = [part["text"].removeprefix("Image ").removesuffix(":") for part in rest[::2]]
    assert all(f"(image {name})" in text["text"] for name in names)
    assert all(part["image_url"]["url"].startswith("data:image/png;base64,") for part in rest[1::2])
    return names


async def test_each_image_of_a_group_is_shown_once() -> None:
    runs = [seen("a", FILES[0], FILES[1]), seen("b", FILES[0], FILES[2]), seen("c", FILES[0], FILES[0])]
    assert sorted(await shown(*runs)) == sorted(map(image_name, FILES[:3]))
    assert len(await shown(*runs, max_images=2)) == 2
    assert await shown(*runs, max_images=0) == []


async def test_what_a_text_calls_an_image_is_none() -> None:
    """A run can name an image that it does not have; nothing is attached for it."""
    assert await shown(seen("a", said=f"(image {image_name(FILES[3])})"), seen("b")) == []


async def test_the_reminder_keeps_the_images() -> None:
    model = Model(lambda request: scorer(request) if len(model.requests) > 1 else "no JSON")
    await ruler(model, passes=1).judge([seen("a", FILES[0]), seen("b", FILES[0], said="more")])
    first, second = (request["messages"][-1]["content"] for request in model.requests[:2])
    assert [part["type"] for part in first] == [part["type"] for part in second] == ["text", "text", "image_url"]
    assert second[0]["text"].startswith(first[0]["text"])
