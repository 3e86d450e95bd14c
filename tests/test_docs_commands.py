"""Every command line of README, docs and examples is one that `journeywork` takes."""

from __future__ import annotations

import argparse
import functools
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Never

import pytest

from pipeline.commands import main as cli
from tests.test_packaging import ROOT

PAGES = (
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/**/README.md"),
)
_BLOCK = re.compile(r"^(?:    )?journeywork (?P<args>(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
_INLINE = re.compile(r"`journeywork ([a-z][a-z-]*)[^`]*`")
_REMOVED = "taken-out.md"
"""The page that names commands which are gone."""


class _TakenError(Exception):
    """A command line was read to its end."""


def _lines() -> list[tuple[str, str]]:
    """Name of the page and arguments of each command line in a block."""
    found = []
    for page in PAGES:
        for match in _BLOCK.finditer(page.read_text("utf-8")):
            args = match["args"].replace("\\\n", " ")
            found.append(
                (page.relative_to(ROOT).as_posix(), re.split(r"\s{3,}(?=\S)|\s+#\s", args.strip())[0])
            )
    return found


@pytest.mark.parametrize(("page", "line"), _lines())
def test_a_command_line_is_taken(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to where it would begin to work: no file that it names is read."""
    line = re.sub(r"(--[a-z-]+) …", r"\1 1", line)
    args = shlex.split(line.replace(" …", ""))  # what a reader has above
    read = argparse.ArgumentParser.parse_known_args

    def parse(parser: argparse.ArgumentParser, *given: object, **more: object) -> Never:
        namespace, rest = read(parser, *given, **more)  # type: ignore[call-overload]
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise _TakenError(namespace)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.chdir(tmp_path)
    module, _ = cli.SUBCOMMANDS.get(args[0], ("", ""))
    monkeypatch.delitem(sys.modules, module, raising=False)  # so that runpy has nothing to warn of
    monkeypatch.setattr(sys, "argv", ["journeywork", *(args[1:] if module else args)])
    run = functools.partial(runpy.run_module, module, run_name="__main__") if module else cli.main
    # What reads its arguments by itself ends because there is no such run.
    with pytest.raises((_TakenError, SystemExit)):
        run()
    assert "usage:" not in capsys.readouterr().err


def test_every_command_that_a_page_names_is_there() -> None:
    named = {
        (page.name, name)
        for page in PAGES
        if page.name != _REMOVED
        for name in _INLINE.findall(page.read_text("utf-8"))
    }
    assert {(page, name) for page, name in named if name not in {*cli.OWN, *cli.SUBCOMMANDS}} == set()
    assert len(named) > 50  # the pattern finds them


def test_all_pages_spell_the_command_in_one_way() -> None:
    """Except for another user, whose shell has not activated the environment."""
    other = [
        f"{page.name}: {line.strip()}"
        for page in PAGES
        for line in page.read_text("utf-8").splitlines()
        if "bin/journeywork" in line and "runuser" not in line
    ]
    assert other == []
