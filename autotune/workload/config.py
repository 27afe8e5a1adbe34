"""Read what to tune from a TOML file, as a :class:`TuneConfig` of workloads.

A config gives, at the top or in ``[[workload]]`` tables that override the top:

    problem = "mace-mp-medium"          # a name or a list, from problems.toml or this file's [problems.NAME] tables,
                                        # or of spherical harmonics: [harmonics.NAME] tables of either, or of
                                        # a product with harmonics of edge vectors: [vectors.NAME] tables, or of
                                        # symmetric contractions: [contractions.NAME] tables
    graph = { cpu = "mof", cuda = "carbon" }   # a name, a list, or one of these by backend; likewise [graphs.NAME]
    operation, directions, dtype, layout, deterministic
    trials                               # the search of one direction ends at this number of finished trials

and, at the top only, ``budget`` ("6m", or a number in seconds), ``patience``, ``sampler``, ``passes`` (what a
comparison times) and the tables ``[record.BACKEND]`` (see :mod:`autotune.workload.workload`). Lists give all
combinations. Without ``problem`` (or ``graph``), those that the file defines are used. An unknown key is an error that
suggests the nearest valid one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotune import paths
from autotune.errors import ConfigError, check_known
from autotune.workload.graphs import (
    MOST_EDGES,
    AtomSource,
    Bulk,
    Crystal,
    DegreeLaw,
    EdgesAlone,
    GraphSpec,
    Molecule,
    NodesAlone,
    Points,
    StructureFile,
    Water,
)
from autotune.workload.kind import Problem
from autotune.workload.known_kinds import KINDS, ProductKind, operations_of, problem_from_key
from autotune.workload.toml_tables import (
    check_sampler,
    check_table,
    config_path,
    count_of,
    number_of,
    parse_duration,
    read_toml,
    tables_of,
)
from autotune.workload.workload import PASSES, Restriction, Workload, restrictions_from
from kernelgen.errors import EquituneError
from kernelgen.problem.product import TensorProductProblem

# Convert TOML tables to problems and graphs as frozen values, or raise ConfigError.
#
# All tables of ``configs/graphs.toml`` count; in other configs those under ``graphs``. Problems are in the tables of
# their kinds: ``problems``, ``harmonics``, ``vectors``, ``contractions``; in ``configs/problems.toml`` all
# other tables are products.

SOURCES = ("crystal", "bulk", "molecule", "points", "structure", "water", "edges", "nodes")
PROBLEM_TABLES = tuple(kind.table for kind in KINDS)


def load_all() -> dict[str, Problem]:
    """The named problems of ``problems.toml``, of every kind."""
    given = read_toml(paths.configs_dir() / "problems.toml")
    others = {table: given.pop(table) for table in PROBLEM_TABLES if table in given and table != ProductKind.table}
    return problems_from({ProductKind.table: given} | others)


def load_problems() -> dict[str, TensorProductProblem]:
    """The tensor products among them."""
    return {name: found for name, found in load_all().items() if isinstance(found, TensorProductProblem)}


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
    check_known("problem", text, problems)
    return problems[text]


def load_graphs() -> dict[str, GraphSpec]:
    """The named graphs of ``graphs.toml``."""
    path = paths.configs_dir() / "graphs.toml"
    return {name: graph_from(name, table, path.parent) for name, table in read_toml(path).items()}


def graph_from(name: str, table: Any, folder: Path) -> GraphSpec:
    """A graph from a table: cutoff, one source of atoms, and optionally repeat; ``folder`` contains the file.

    Alternatively the law of its ``degrees``; or only the number of ``edges``, or of ``nodes`` and, optionally, of the
    ``elements`` that there are weights of, and of those ``occurring``.
    """
    what, keys = f"graph {name!r}", table if isinstance(table, Mapping) else ()
    if "edges" in keys:
        check_table(table, what, ("edges",))
        return GraphSpec(name, EdgesAlone(count_of(f"{what}: edges", table["edges"])))
    if "nodes" in keys:
        check_table(table, what, ("nodes", "elements", "occurring"))
        counts = {key: count_of(f"{what}: {key}", value) for key, value in table.items()}
        alone = NodesAlone(counts.pop("nodes"), **counts)
        if alone.occurring > alone.elements:
            raise ConfigError(
                f"{what}: {alone.occurring} elements occur; expected at most its {alone.elements} elements"
            )
        return GraphSpec(name, alone)
    if "degrees" in keys:
        check_table(table, what, ("degrees",))
        return GraphSpec(name, _degree_law(f"{what}: degrees", table["degrees"]))
    check_table(table, what, ("cutoff", "repeat", *SOURCES), required=("cutoff",))
    given = [source for source in SOURCES if source in table]
    if len(given) != 1:
        raise ConfigError(f"{what} has {given or 'no source of atoms'}; expected exactly one of {SOURCES}")
    repeat = tuple(table.get("repeat", (1, 1, 1)))
    if len(repeat) != 3 or not all(isinstance(n, int) and n > 0 for n in repeat):
        raise ConfigError(f"{what}: repeat is {repeat}; expected three positive integers")
    source = _source(f"{what}: {given[0]}", given[0], table[given[0]], folder)
    return GraphSpec(name, source, number_of(f"{what}: cutoff", table["cutoff"]), repeat)


def _degree_law(what: str, table: Any) -> DegreeLaw:
    check_table(table, what, ("nodes", "law", "least", "most", "seed"), required=("nodes", "law", "least", "most"))
    nodes, least, most = (count_of(f"{what}.{key}", table[key]) for key in ("nodes", "least", "most"))
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
        number, density = count_of(f"{what}.number", value["number"]), number_of(f"{what}.density", value["density"])
        return Points(number, density, _seed_of(what, value))
    if kind == "water":
        check_table(value, what, ("side", "seed"), required=("side",))
        return Water(count_of(f"{what}.side", value["side"]), _seed_of(what, value))
    if kind == "bulk":
        check_table(value, what, ("name", "crystalstructure", "a", "cubic"), required=("name", "crystalstructure", "a"))
        a = number_of(f"{what}.a", value["a"])
        return Bulk(value["name"], value["crystalstructure"], a, value.get("cubic", True))
    check_table(value, what, ("spacegroup", "cell", "sites"), required=("spacegroup", "cell", "sites"))
    try:
        sites = tuple((str(symbol), float(x), float(y), float(z)) for symbol, x, y, z in value["sites"])
        return Crystal(int(value["spacegroup"]), tuple(float(length) for length in value["cell"]), sites)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: expected sites like ['Zn', 0.29, 0.2, 0.2] and a cell of six numbers") from error


WORKLOAD_KEYS = ("problem", "graph", "operation", "directions", "dtype", "layout", "deterministic")
# A table of workloads may also have its own number of trials per study.
TABLE_KEYS = (*WORKLOAD_KEYS, "trials")
SEARCH_KEYS = ("budget", "trials", "patience", "sampler", "record")
TOP_KEYS = (*WORKLOAD_KEYS, "workload", *PROBLEM_TABLES, "graphs", "passes", *SEARCH_KEYS)
BACKENDS = ("cpu", "cuda")


@dataclass(frozen=True)
class TuneConfig:
    """Workloads with the requested budget (total seconds, comparisons included), trials and sampler.

    workload_trials: for workloads whose table gives its own number. patience: end a search after this many trials in a
    row without a gain. record: by backend, the part of the space to record.
    passes: what a comparison times, from ``autotune.workload.workload.PASSES``; None for those of a model.
    """

    path: Path
    workloads: tuple[Workload, ...]
    budget_s: float | None = None
    trials: int | None = None
    sampler: str = "auto"
    patience: int | None = None
    record: Mapping[str, Restriction] = field(default_factory=dict)
    passes: tuple[str, ...] | None = None
    workload_trials: Mapping[Workload, int] = field(default_factory=dict)


def load_config(name_or_path: str | Path, backend: str | None = None) -> TuneConfig:
    """The config at a path or with a name. ``backend`` (cpu, cuda) selects graphs; by default cuda if torch sees it."""
    path = config_path(name_or_path)
    backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; expected one of {BACKENDS}")
    table = read_toml(path)  # its errors include the file name
    try:
        return _config(path, table, backend)
    except EquituneError as error:
        raise ConfigError(f"{path}: {error}") from error


def _config(path: Path, table: Mapping[str, Any], backend: str) -> TuneConfig:
    check_table(table, "config", TOP_KEYS)
    local_graphs = {name: graph_from(name, t, path.parent) for name, t in tables_of(table, "graphs").items()}
    shipped = load_all()
    local_problems = problems_from(table, known=shipped)
    problems, graphs = shipped | local_problems, load_graphs() | local_graphs
    shared = {"problem": list(local_problems), "graph": list(local_graphs)}
    shared |= {key: table[key] for key in WORKLOAD_KEYS if key in table}
    workloads: list[Workload] = []
    own_trials: dict[Workload, int] = {}
    for given in table.get("workload", [{}]):
        check_table(given, "workload", TABLE_KEYS)
        found = _workloads({**shared, **given}, problems, graphs, backend)
        if "trials" in given:
            count = count_of("workload.trials", given["trials"])
            own_trials |= {workload: count for workload in found if workload not in workloads}
        workloads += found
    sampler = check_sampler(table.get("sampler", "auto"))
    trials, patience = (count_of(key, table[key]) if key in table else None for key in ("trials", "patience"))
    budget = parse_duration(table["budget"]) if "budget" in table else None
    restrictions = restrictions_from(table.get("record", {}))
    passes = _passes(table["passes"], workloads) if "passes" in table else None
    chosen = tuple(dict.fromkeys(workloads))
    return TuneConfig(path, chosen, budget, trials, sampler, patience, restrictions, passes, own_trials)


def by_problem(workloads: Sequence[Workload]) -> list[Workload]:
    """Group workloads by problem; problems, and the workloads of each, keep their order."""
    problems = list(dict.fromkeys(workload.problem for workload in workloads))
    return sorted(workloads, key=lambda workload: problems.index(workload.problem))


def _passes(value: Any, workloads: Sequence[Workload]) -> tuple[str, ...]:
    """The passes, if every workload has the directions for them; else ConfigError."""
    passes = tuple(dict.fromkeys(_names("passes", value)))
    for name in passes:
        check_known("pass", name, PASSES)
        for workload in workloads:
            needed = workload.kind.passes.get(name) or workload.kind.combined.get(name, (name,))
            missing = [direction for direction in needed if direction not in workload.directions]
            if missing:
                raise ConfigError(f"pass {name!r} needs the directions {missing}; expected them in directions")
    return passes


def _workloads(
    table: Mapping[str, Any],
    problems: Mapping[str, Problem],
    graphs: Mapping[str, GraphSpec],
    backend: str,
) -> list[Workload]:
    for key in ("problem", "graph"):
        if not table[key]:
            raise ConfigError(f"no {key} is given; expected {key} = a name or a list of names")
    graph = table["graph"]
    if isinstance(graph, Mapping):
        check_table(graph, "graph by backend", BACKENDS, required=(backend,))
        graph = graph[backend]
    options = {key: table[key] for key in ("dtype", "layout", "deterministic") if key in table}
    if "directions" in table:
        options["directions"] = tuple(_names("directions", table["directions"]))
    found = []
    for label, on in itertools.product(_names("problem", table["problem"]), _names("graph", graph)):
        check_known("problem", label, problems)
        check_known("graph", on, graphs)
        operation = table.get("operation", operations_of(problems[label])[0])
        found.append(Workload(label, problems[label], operation, graphs[on], **options))
    return found


def _names(key: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} is {value!r}; expected a name or a list of names")
    return names
