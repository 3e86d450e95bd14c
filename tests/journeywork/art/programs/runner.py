"""Runs a script as a notebook would: it may await at its top level.

    python -m tests.journeywork.art.programs.runner PROGRAM

Packages for tracing that are not installed are stood in for by objects that do nothing."""

import ast
import asyncio
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

TRACING = ("weave", "openpipe", "openpipe.client")


class StandIn(types.ModuleType):
    """A module whose every name is a decorator, a function and a class that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if given and callable(given[0]) else self


def main() -> None:
    program = Path(sys.argv[1])
    missing = [name for name in TRACING if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: StandIn(name) for name in missing})
    sys.path.insert(0, str(program.parent))
    sys.argv = sys.argv[1:]
    module = types.ModuleType("__main__")
    module.__file__ = str(program)
    sys.modules["__main__"] = module
    code = compile(program.read_text(), str(program), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ended = eval(code, module.__dict__)  # a coroutine if it awaits at its top level
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


if __name__ == "__main__":
    main()
