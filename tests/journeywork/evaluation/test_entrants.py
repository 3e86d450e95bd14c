from pathlib import Path

import pytest

from journeywork.evaluation.entrants import parse_entrant


@pytest.mark.parametrize("text", ["", "@1", "m@", "m@x", "http://h/v1#m"])
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no entrant"):
        parse_entrant(text)


def test_an_entrant_with_a_prompt_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Play.")
    for model in ("m@3", "m+strict"):
        entrant = parse_entrant(text := f"{model}+prompt:{tmp_path / 'a.txt'}")
        assert (entrant.name, entrant.prompt) == (text, "Play.")
        assert parse_entrant(model).prompt == ""
    with pytest.raises(OSError, match="No such file"):
        parse_entrant("m+prompt:none.txt")
