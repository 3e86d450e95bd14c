"""The names of ART that programs use are here; any other says where to read."""

from operator import attrgetter
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

import journeywork.art as art
from journeywork.art.guided_completion import get_guided_completion_params
from journeywork.art.trajectories import as_groups


@pytest.mark.parametrize("name", ["yield_trajectory", "dev.TinkerArgs", "utils.log_http_errors"])
def test_any_other_name_says_where_to_read(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"journeywork\.art\.{name} is not in Journeywork: docs/art\.md lists"):
        attrgetter(name)(art)
    assert not hasattr(art, "yield_trajectory")


async def test_nothing_is_copied_to_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs call both without one."""
    monkeypatch.delenv("BACKUP_BUCKET", raising=False)
    backend, model = art.RemoteBackend("http://gateway"), art.Model(name="m", project="p")
    await backend._experimental_pull_from_s3(model, verbose=True)
    monkeypatch.setenv("BACKUP_BUCKET", "b")
    for copy in (backend._experimental_push_to_s3, backend._experimental_pull_from_s3):
        with pytest.raises(art.UnsupportedError, match=r"set store\.dir of the installation to s3://b"):
            await copy(model)


def test_lists_are_groups_and_none_is_left_out() -> None:
    trajectory = art.Trajectory(messages_and_choices=[], reward=1.0)
    group = art.TrajectoryGroup([trajectory])
    groups = as_groups([group, [trajectory, trajectory], None, trajectory])
    assert [len(each) for each in groups] == [1, 2, 1]
    assert groups[0] is group


def test_a_teachers_reply_guides_a_student() -> None:
    def completion(message: dict[str, Any]) -> ChatCompletion:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
        made = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return ChatCompletion.model_validate(made)

    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert get_guided_completion_params(completion({"content": "yes"})) == (["yes"], None, None)
    call = {"id": "i", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    choices, tool, frozen = get_guided_completion_params(completion({"tool_calls": [call]}), tools)
    assert (choices, tool) == (None, {"type": "function", "function": {"name": "look"}})
    assert frozen is not None
    assert frozen[0]["function"]["parameters"]["properties"] == {"at": {"const": 1}}
    assert tools[0]["function"]["parameters"] == {"type": "object"}, "the given tool is as it was"
    with pytest.raises(ValueError, match="'look', which is not in `base_tools`"):
        get_guided_completion_params(completion({"tool_calls": [call]}))
