"""The public names of openpipe-art, and the tables of docs/art.md that say which of them `journeywork.art` has.

    python -m tests.journeywork.art.names                  # writes the table from names.json
    python -m tests.journeywork.art.names --package PATH   # first reads the names of the unpacked wheel's folder `art`

It reads the package's syntax and does not import it, as most of its modules need a GPU's libraries. Public are the
names of `__all__`, those that a module defines, those that an `__init__` imports of the package, and the methods of
models, backends, trajectories and groups; but type variables, loggers, and what begins with an underscore."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

from journeywork.art.refused import METHODS, REFUSED, sentence_for

FILE = Path(__file__).with_name("names.json")
PAGE = Path(__file__).parents[3] / "docs" / "art.md"
BEGIN, END = "<!-- names of openpipe-art, generated -->\n", "<!-- end -->\n"
CLASSES = (
    "Model",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "History",
    "LocalBackend",
    "ServerlessBackend",
)
WHOLE = {
    "api_costs": ["track_api_cost"],
    "megatron": ["MegatronBackend"],
    "preprocessing": [],
    "test": [],
    "tinker": ["TinkerBackend"],
    "tinker_native": ["TinkerNativeBackend"],
    "transformers": [],
    "unsloth": [],
    "weight_transfer": [],
}
"""Packages that are refused but for these names: the others are not listed."""


def names_of(path: Path) -> list[str]:
    """The public names that a module's file defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                methods = (n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
                names |= {
                    f"{node.name}.{name}" for name in methods if name[0] != "_" or name.startswith("_experi")
                }
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if isinstance(node.value, ast.Call) and re.search("TypeVar|getLogger", ast.dump(node.value.func)):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and target.id == "__all__" and node.value is not None:
                    names |= set(ast.literal_eval(node.value))
                elif isinstance(target, ast.Name):
                    names.add(target.id)
        elif isinstance(node, ast.ImportFrom) and path.stem == "__init__" and _is_arts(node):
            names |= {alias.asname or alias.name for alias in node.names}
    return sorted(name for name in names if not name.startswith("_"))


def _is_arts(node: ast.ImportFrom) -> bool:
    return bool(node.level) or (node.module or "").startswith("art")


def inventory(package: Path) -> dict[str, list[str]]:
    """The public names of each module of an unpacked openpipe-art."""
    modules: dict[str, list[str]] = dict(WHOLE)
    for path in sorted(package.rglob("*.py")):
        parts = [*path.relative_to(package).parent.parts, *([] if path.stem == "__init__" else [path.stem])]
        if not parts or (parts[0] not in WHOLE and not any(part.startswith("_") for part in parts)):
            modules[".".join(parts)] = names_of(path)
    return modules


def state_of(module: str, name: str) -> str:
    """`here`, or what to do instead. Raises `LookupError` if a name is neither here nor refused."""
    if (sentence := sentence_for(f"{module}.{name}".strip("."))) is not None:
        return sentence
    value: Any = importlib.import_module(f"journeywork.art.{module}".rstrip("."))
    for part in name.split("."):
        if hasattr(value, part) or part in getattr(value, "model_fields", {}):
            value = getattr(value, part, None)
        elif part in METHODS:
            return METHODS[part]
        else:
            raise LookupError(
                f"art.{module}.{name} is neither in journeywork.art nor in its module `refused`"
            )
    return "here"


def table(modules: dict[str, list[str]]) -> str:
    """Two tables as Markdown: a line a module with what is here, and a line a sentence with the names that it refuses.
    A module stands for all of its names."""
    here = ["| module of ART | names that are here |", "| --- | --- |"]
    instead: dict[str, list[str]] = {}
    for module, names in sorted(modules.items()):
        whole = next((name for name in REFUSED if f"{module}.".startswith(f"{name}.")), None)
        if whole is None:
            states = {name: state_of(module, name) for name in names}
            ours = [name for name, state in states.items() if state == "here"]
            refused = {
                f"`art.{module}.{name}`".replace("..", "."): s for name, s in states.items() if s != "here"
            }
        else:
            ours = WHOLE.get(module, [])
            defined = importlib.import_module(f"journeywork.art.{module}").__dict__
            if lacking := [name for name in ours if name not in defined]:
                raise LookupError(f"art.{module} lacks {', '.join(lacking)}")
            refused = {f"`art.{whole}`{' (others)' if ours else ''}": REFUSED[whole]}
        if ours:
            listed = ", ".join(f"`{name}`" for name in ours)
            here.append(f"| `{f'art.{module}'.rstrip('.')}` | {listed} |")
        for name, sentence in refused.items():
            if name not in instead.setdefault(sentence, []):
                instead[sentence].append(name)
    rows = [f"| {', '.join(listed)} | {sentence} |" for sentence, listed in instead.items()]
    return "\n".join([*here, "", "| refused names | instead |", "| --- | --- |", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", type=Path)
    package = parser.parse_args().package
    if package is not None:
        FILE.write_text(json.dumps(inventory(package), indent=1) + "\n")
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(json.loads(FILE.read_text())) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
