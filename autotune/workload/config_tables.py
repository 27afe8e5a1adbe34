"""Convert TOML tables to problems and graphs as frozen values, or raise ConfigError.

All tables of ``configs/graphs.toml`` count; in other configs those under ``graphs``. Problems are in the tables of
their kinds: ``problems``, ``harmonics``, ``vectors``, ``contractions``; in ``configs/problems.toml`` all
other tables are products.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import paths
from autotune.errors import ConfigError, unknown_name
from autotune.workload.edge_lists import DegreeLaw
from autotune.workload.graphs import (
    MOST_EDGES,
    AtomSource,
    Bulk,
    Crystal,
    EdgesAlone,
    GraphSpec,
    Molecule,
    NodesAlone,
    Points,
    StructureFile,
)
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import KINDS, problem_from_key
from autotune.workload.kinds.tensor_product import ProductKind
from autotune.workload.toml_tables import check_table, count_of, number_of, read_toml, tables_of
from autotune.workload.water import Water
from kernelgen.problem.product import TensorProductProblem

SOURCES = ("crystal", "bulk", "molecule", "points", "structure", "water", "edges", "nodes")
PROBLEM_TABLES = tuple(kind.table for kind in KINDS)


def load_all(path: Path | None = None) -> dict[str, Problem]:
    """The named problems of ``problems.toml`` (or another such file), of every kind."""
    given = read_toml(path or paths.configs_dir() / "problems.toml")
    others = {table: given.pop(table) for table in PROBLEM_TABLES if table in given and table != ProductKind.table}
    return problems_from({ProductKind.table: given} | others)


def load_problems(path: Path | None = None) -> dict[str, TensorProductProblem]:
    """The tensor products among them."""
    return {name: found for name, found in load_all(path).items() if isinstance(found, TensorProductProblem)}


def problems_from(table: Mapping[str, Any], known: Mapping[str, Problem] | None = None) -> dict[str, Problem]:
    """The problems that a config's tables define; they may be made of each other and of ``known`` ones."""
    found: dict[str, Problem] = {}
    for kind in KINDS:
        others = {**(known or {}), **found}
        for name, given in tables_of(table, kind.table).items():
            found[name] = kind.problem_from(name, given, others)
    return found


def find_problem(text: str) -> Problem:
    """A problem by its name in ``problems.toml`` or by its key; ConfigError with the nearest name otherwise."""
    if "|" in text:
        return problem_from_key(text)
    problems = load_all()
    if text not in problems:
        raise ConfigError(unknown_name("problem", text, problems))
    return problems[text]


def load_graphs(path: Path | None = None) -> dict[str, GraphSpec]:
    """The named graphs of ``graphs.toml`` (or another such file)."""
    path = path or paths.configs_dir() / "graphs.toml"
    return {name: graph_from(name, table, path.parent) for name, table in read_toml(path).items()}


def graph_from(name: str, table: Any, folder: Path) -> GraphSpec:
    """A graph from a table: cutoff, one source of atoms, and optionally repeat; ``folder`` contains the file.

    Alternatively the law of its ``degrees``; or only the number of ``edges``, or of ``nodes`` and, optionally, of the
    ``elements`` that there are weights of, and of those ``occurring``.
    """
    if isinstance(table, Mapping) and "edges" in table:
        check_table(table, f"graph {name!r}", ("edges",))
        number = count_of(f"graph {name!r}: edges", table["edges"])
        assert number is not None
        return GraphSpec(name, EdgesAlone(number))
    if isinstance(table, Mapping) and "nodes" in table:
        return GraphSpec(name, _nodes_alone(f"graph {name!r}", table))
    if isinstance(table, Mapping) and "degrees" in table:
        check_table(table, f"graph {name!r}", ("degrees",))
        return GraphSpec(name, _degree_law(f"graph {name!r}: degrees", table["degrees"]))
    check_table(table, f"graph {name!r}", ("cutoff", "repeat", *SOURCES), required=("cutoff",))
    given = [source for source in SOURCES if source in table]
    if len(given) != 1:
        raise ConfigError(f"graph {name!r} has {given or 'no source of atoms'}; expected exactly one of {SOURCES}")
    repeat = tuple(table.get("repeat", (1, 1, 1)))
    if len(repeat) != 3 or not all(isinstance(n, int) and n > 0 for n in repeat):
        raise ConfigError(f"graph {name!r}: repeat is {repeat}; expected three positive integers")
    source = _source(f"graph {name!r}: {given[0]}", given[0], table[given[0]], folder)
    return GraphSpec(name, source, number_of(f"graph {name!r}: cutoff", table["cutoff"]), repeat)


def _nodes_alone(what: str, table: Mapping[str, Any]) -> NodesAlone:
    check_table(table, what, ("nodes", "elements", "occurring"))
    counts = {key: count_of(f"{what}: {key}", value) or 1 for key, value in table.items()}
    found = NodesAlone(counts.pop("nodes"), **counts)
    if found.occurring > found.elements:
        raise ConfigError(f"{what}: {found.occurring} elements occur; expected at most its {found.elements} elements")
    return found


def _degree_law(what: str, table: Any) -> DegreeLaw:
    check_table(table, what, ("nodes", "law", "least", "most", "seed"), required=("nodes", "law", "least", "most"))
    nodes, least, most = (count_of(f"{what}.{key}", table[key]) or 1 for key in ("nodes", "least", "most"))
    try:
        law = DegreeLaw(nodes, table["law"], least, most, _seed_of(what, table))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    if nodes * most > MOST_EDGES:
        raise ConfigError(f"{what}: up to {nodes * most:.2g} edges; at most {MOST_EDGES:.2g} fit")
    return law


def _seed_of(what: str, table: Mapping[str, Any]) -> int:
    seed = table.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"{what}.seed is {seed!r}; expected an integer that is not negative")
    return seed


def _source(what: str, kind: str, value: Any, folder: Path) -> AtomSource:
    if kind in ("molecule", "structure"):
        if not isinstance(value, str):
            raise ConfigError(f"{what} is {value!r}; expected a text")
        return Molecule(value) if kind == "molecule" else StructureFile(value, str(folder))
    if kind == "points":
        check_table(value, what, ("number", "density", "seed"), required=("number", "density"))
        number = count_of(what + ".number", value["number"])
        assert number is not None
        return Points(number, number_of(what + ".density", value["density"]), _seed_of(what, value))
    if kind == "water":
        check_table(value, what, ("side", "seed"), required=("side",))
        side = count_of(what + ".side", value["side"])
        assert side is not None
        return Water(side, _seed_of(what, value))
    if kind == "bulk":
        check_table(value, what, ("name", "crystalstructure", "a", "cubic"), required=("name", "crystalstructure", "a"))
        return Bulk(
            value["name"], value["crystalstructure"], number_of(what + ".a", value["a"]), value.get("cubic", True)
        )
    check_table(value, what, ("spacegroup", "cell", "sites"), required=("spacegroup", "cell", "sites"))
    try:
        sites = tuple((str(symbol), float(x), float(y), float(z)) for symbol, x, y, z in value["sites"])
        return Crystal(int(value["spacegroup"]), tuple(float(length) for length in value["cell"]), sites)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: expected sites like ['Zn', 0.29, 0.2, 0.2] and a cell of six numbers") from error
