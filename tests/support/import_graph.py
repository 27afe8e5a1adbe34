"""Finds which file of a package imports which, for the import rule in ``test_architecture``.

All imports in the sources count, those in functions and under ``TYPE_CHECKING`` too, and ``import_module`` calls with a
literal name. That ``import a.b`` also runs ``a/__init__.py`` does not count.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from places import ROOT

# By package, its files and sub-packages in processing order: each may import itself and those before it.
ORDERS = {
    "kernelgen": (
        *("errors", "version", "old_paths", "compat", "files", "device"),
        *("problem", "arithmetic", "kernels", "compile", "runtime", "ops", "packs"),
    ),
    "autotune": (
        *("errors", "old_paths", "paths", "text"),
        *("workload", "database", "modules", "models", "measure", "search", "compare"),
        *("tune", "bench", "certification", "replay", "report", "cli", "equitune"),
    ),
}

Graph = dict[str, set[str]]


@functools.cache
def imported(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every import of a file: the module's name as written (relative ones with dots), and the names taken from it."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value), ()


def import_graph(package: str, root: Path = ROOT, among: Iterable[str] = ()) -> Graph:
    """By module of a package, the modules of the same package that it imports: ``{"kernelgen.device": {...}, ...}``.

    The name of an ``__init__.py`` is that of its folder. among: packages whose modules count as well.
    """
    folders = {package, *among}
    files = {_module_name(path.relative_to(root)): path for folder in folders for path in (root / folder).rglob("*.py")}
    graph: Graph = {}
    for module, path in sorted(files.items()):
        if module.split(".")[0] != package:
            continue
        graph[module] = set()
        for name, taken in imported(path):
            base = _absolute(name, module, path.name == "__init__.py")
            # ``from a import b``: b is a module of the package a, or a name that a/__init__.py defines.
            modules = {f"{base}.{item}" if f"{base}.{item}" in files else base for item in taken} or {base}
            graph[module] |= modules & set(files)
    return graph


def lone_files(packages: Iterable[str], root: Path = ROOT) -> list[str]:
    """Files that a single other file imports, which stands beside them: they could be one."""
    graph: Graph = {}
    for package in packages:
        graph |= import_graph(package, root, packages)
    importers: dict[str, set[str]] = {module: set() for module in graph}
    for module, others in graph.items():
        for other in others - {module}:
            importers[other].add(module)
    return sorted(
        module
        for module, users in importers.items()
        if not (root / module.replace(".", "/")).is_dir()
        and len(users) == 1
        and min(users).rpartition(".")[0] == module.rpartition(".")[0]
    )


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _absolute(name: str, module: str, is_package: bool) -> str:
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if level == 0:
        return name
    parts = module.split(".")
    here = parts[: len(parts) - level + is_package]
    return ".".join([*here, rest] if rest else here)


def circles(graph: Graph) -> list[list[str]]:
    """Sets of files that import each other, directly or through others, each sorted; a file that imports itself too."""
    reached = {module: _reached(graph, module) for module in graph}
    found = {
        frozenset(m for m in reached[module] if module in reached[m]) for module in graph if module in reached[module]
    }
    return sorted(sorted(circle) for circle in found)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen


def upward_imports(graph: Graph, package: str, order: Sequence[str]) -> list[str]:
    """Imports of later parts in ``order``, and parts of the package that ``order`` does not name.

    order: files and sub-packages of ``package``; each may import itself and those before it. The package's own
    ``__init__.py`` and ``__main__.py`` come after all of them.
    """
    rank = {name: place for place, name in enumerate((*order, "__init__", "__main__"))}

    def part(module: str) -> str:
        return module.split(".")[1] if module != package else "__init__"

    unnamed = sorted({part(module) for module in graph} - set(rank))
    later = [
        f"{module} imports {other}"
        for module in sorted(graph)
        for other in sorted(graph[module])
        if part(module) in rank and part(other) in rank and rank[part(module)] < rank[part(other)]
    ]
    return [f"{name} has no place in the order" for name in unnamed] + later
