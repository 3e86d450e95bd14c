"""The rules for imports, which keep every package readable by itself.

1. A service imports `pipeline` and itself, never another service. The SDK (`journeywork`) imports none of them, and
   they import nothing of it but `MATHEMATICS`: it needs the standard library alone, and written twice it was compared
   by a test.
2. Within a package, no two modules import each other, directly or through others. What two modules share belongs in a
   third module that imports neither. Imports under `TYPE_CHECKING` and inside functions count: a reader has to follow
   them too. The rule holds for benchmarks and examples as well.
3. A room (a package within a package) with a row in `ROOMS` imports only the rooms of its package that the row names.
4. A room says in the docstring of its `__init__.py` what lives there, module by module.
"""

import ast
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "pipeline": set(),
    "rollout_gateway": {"pipeline"},
    "judge": {"pipeline"},
    "trainer": {"pipeline"},
    "store": {"pipeline"},
    "journeywork": set(),
}
MATHEMATICS = "journeywork.statistics"
ROOMS = {
    "rollout_gateway.vllm_plugin": set[str](),
    "rollout_gateway.http": set[str](),
    "rollout_gateway.dialects": {"rollout_gateway.http"},
    "rollout_gateway.access": {"rollout_gateway.http"},
    "rollout_gateway.serving": {f"rollout_gateway.{room}" for room in ("http", "access")},
    "rollout_gateway.sampler": {f"rollout_gateway.{room}" for room in ("http", "serving")},
    "rollout_gateway.capture": {f"rollout_gateway.{room}" for room in ("http", "dialects", "access", "serving")},
    "rollout_gateway.outside": {
        f"rollout_gateway.{room}" for room in ("http", "dialects", "access", "serving", "capture")
    },
    "rollout_gateway.api": {
        f"rollout_gateway.{room}" for room in ("http", "dialects", "access", "serving", "capture", "outside")
    },
    "store.reading": {f"store.{room}" for room in ("alarms", "lake")},
}


def module_names(package: str) -> dict[str, Path]:
    """The modules of a package by dotted name. The files of a starter project are a user's."""
    paths = (p for p in (ROOT / package).rglob("*.py") if "template" not in p.parts)
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node outside of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from statements(node)


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Dotted names that the nodes import: `from a.b import c` gives `a.b` and `a.b.c`."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dependencies(package: str, nodes: Callable[[ast.AST], Iterator[ast.AST]] = statements) -> dict[str, set[str]]:
    """Module to the modules of the same package that it imports in the `nodes` of its tree: those outside of functions,
    or all with `ast.walk`.

    `from a.b import c` imports the module `a.b.c` where there is one, and `a.b` only for other names."""
    modules = module_names(package)
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        needed: set[str] = set()
        for node in nodes(ast.parse(path.read_text("utf-8"))):
            names = imported(iter((node,)))
            if isinstance(node, ast.ImportFrom) and all(
                f"{node.module}.{alias.name}" in modules for alias in node.names
            ):
                names.discard(node.module or "")
            needed |= names & modules.keys()
        graph[name] = needed - {name}
    return graph


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_the_design_allows(package: str) -> None:
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package}
    wrong = {
        name: bad
        for name, path in module_names(package).items()
        if (
            bad := {
                n.partition(".")[0]
                for n in imported(iter(list(ast.walk(ast.parse(path.read_text("utf-8"))))))
                if not f"{n}.".startswith(f"{MATHEMATICS}.")
            }
            & forbidden
        )
    }
    assert not wrong


@pytest.mark.parametrize("package", [*MAY_IMPORT, "benchmarks", "examples"])
def test_no_modules_import_each_other(package: str) -> None:
    try:
        TopologicalSorter(dependencies(package, ast.walk)).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}; move what the modules share into a third one")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    package = room.partition(".")[0]
    allowed = tuple(f"{name}." for name in (room, *ROOMS[room]))
    wrong = {
        name: bad
        for name, needed in dependencies(package).items()
        if name.startswith(f"{room}.") and (bad := {n for n in needed if not f"{n}.".startswith(allowed)})
    }
    assert not wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_the_docstring_of_a_room_lists_its_modules(package: str) -> None:
    unnamed: list[str] = []
    for room in (ROOT / package).rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(room.read_text("utf-8"))) or ""
        inside = [p.stem for p in room.parent.glob("*.py")] + [p.parent.name for p in room.parent.glob("*/__init__.py")]
        unnamed += [f"{room.parent.relative_to(ROOT)}: {n}" for n in inside if not n.startswith("__") and n not in doc]
    assert not unnamed
