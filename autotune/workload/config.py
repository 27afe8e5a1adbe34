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
comparison times) and the tables ``[record.BACKEND]`` (see :mod:`autotune.workload.restriction`). Lists give all
combinations. Without ``problem`` (or ``graph``), those that the file defines are used. An unknown key is an error that
suggests the nearest valid one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.errors import ConfigError, unknown_name
from autotune.workload.config_tables import PROBLEM_TABLES, graph_from, load_all, load_graphs, problems_from
from autotune.workload.graphs import GraphSpec
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import operations_of
from autotune.workload.passes import PASSES
from autotune.workload.restriction import Restriction, restrictions_from
from autotune.workload.toml_tables import (
    SAMPLERS,
    check_table,
    config_path,
    count_of,
    parse_duration,
    read_toml,
    tables_of,
)
from autotune.workload.workload import Workload
from kernelgen.errors import EquituneError

WORKLOAD_KEYS = ("problem", "graph", "operation", "directions", "dtype", "layout", "deterministic")
# A table of workloads may also have its own number of trials per study.
TABLE_KEYS = (*WORKLOAD_KEYS, "trials")
SEARCH_KEYS = ("budget", "trials", "patience", "sampler", "record")
TOP_KEYS = (*WORKLOAD_KEYS, "workload", *PROBLEM_TABLES, "graphs", "passes", *SEARCH_KEYS)
BACKENDS = ("cpu", "cuda")
T = TypeVar("T")


@dataclass(frozen=True)
class TuneConfig:
    """Workloads with the requested budget (total seconds, comparisons included), trials and sampler.

    workload_trials: for workloads whose table gives its own number. patience: end a search after this many trials in a
    row without a gain. record: by backend, the part of the space to record.
    passes: what a comparison times, from ``autotune.workload.passes.PASSES``; None for those of a model.
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
        if (count := count_of("workload.trials", given.get("trials"))) is not None:
            own_trials |= {workload: count for workload in found if workload not in workloads}
        workloads += found
    sampler = table.get("sampler", "auto")
    if sampler not in SAMPLERS:
        raise ConfigError(unknown_name("sampler", str(sampler), SAMPLERS))
    trials, patience = (count_of(key, table.get(key)) for key in ("trials", "patience"))
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
        if name not in PASSES:
            raise ConfigError(unknown_name("pass", name, PASSES))
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
        problem = _pick("problem", label, problems)
        operation = table.get("operation", operations_of(problem)[0])
        found.append(Workload(label, problem, operation, _pick("graph", on, graphs), **options))
    return found


def _pick(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(unknown_name(kind, name, known))
    return known[name]


def _names(key: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} is {value!r}; expected a name or a list of names")
    return names
