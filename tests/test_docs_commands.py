"""Every command line of README, docs and examples is one that `journeywork` takes."""

import argparse
import functools
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Never

import pytest

from pipeline.commands import main as cli
from tests.test_packaging import ROOT

PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md"))
_BLOCK = re.compile(r"^(?:    )?journeywork (?P<args>(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
_INLINE = re.compile(r"`journeywork ([a-z][a-z-]*)[^`]*`")
_MODULE = re.compile(r"(?:^| |`)python -m ([a-z_]+(?:\.[a-z_]+)*)", re.MULTILINE)
_TARGET = re.compile(r"(?:^    |`)make ([a-z][\w-]*)", re.MULTILINE)
_FILE = re.compile(r"(?:^    |pytest |-f |`)((?:tests|benchmarks|examples|deploy)/[\w/-]+(?:\.\w+)?)", re.MULTILINE)


class _TakenError(Exception):
    """A command line was read to its end."""


def _lines() -> list[tuple[str, str]]:
    """Name of the page and arguments of each command line in a block."""
    found = []
    for page in PAGES:
        for match in _BLOCK.finditer(page.read_text("utf-8")):
            args = match["args"].replace("\\\n", " ")
            found.append((page.relative_to(ROOT).as_posix(), re.split(r"\s{3,}(?=\S)|\s+#\s", args.strip())[0]))
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
    named = {(page.name, name) for page in PAGES for name in _INLINE.findall(page.read_text("utf-8"))}
    assert {(page, name) for page, name in named if name not in {*cli.OWN, *cli.SUBCOMMANDS}} == set()
    assert len(named) > 50  # the pattern finds them


def test_every_program_and_file_that_a_page_names_is_there() -> None:
    """A figure names the command that measures it, so the command has to run."""
    targets = " ".join(re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)).split()
    exists = {_MODULE: _importable, _TARGET: lambda name: name in targets, _FILE: lambda name: (ROOT / name).exists()}
    texts = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in PAGES}
    named = [(page, kind, name) for page, text in texts.items() for kind in exists for name in kind.findall(text)]
    assert [(page, name) for page, kind, name in named if not exists[kind](name)] == []
    assert len(named) > 50  # the patterns find them


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
