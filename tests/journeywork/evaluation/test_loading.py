import re
from pathlib import Path

import pytest

from journeywork.evaluation.loading import load_rollout, load_scenarios

HERE = "tests.journeywork.evaluation.kit"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_colon", "'no_colon' must have the form module:name"),
        ("no.such:thing", "'no.such:thing': there is no module 'no.such'"),
        (f"{HERE}:nothing", f"'{HERE}:nothing': the module '{HERE}' has no 'nothing'"),
    ],
)
def test_what_can_t_be_loaded_is_said_so(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load_rollout(text)


def test_what_is_no_list_of_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no function but list"):
        load_rollout(f"{HERE}:TASKS")
    with pytest.raises(ValueError, match="No such file"):
        load_scenarios(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n{')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        load_scenarios(str(tmp_path / "bad.jsonl"))
