"""What to tune, read from TOML: enters a file, leaves a :class:`TuneConfig` of workloads.

A config gives, at the top or in ``[[workload]]`` tables that override the top:

    problem = "mace-mp-medium"          # a name or a list, from problems.toml or this file's [problems.NAME] tables,
                                        # or of spherical harmonics: [harmonics.NAME] tables of either
    graph = { cpu = "mof", cuda = "carbon" }   # a name, a list, or one of these by backend; likewise [graphs.NAME]
    operation, directions, dtype, layout, deterministic
    trials                               # finished trials at which the search of one direction ends

and, at the top only, ``budget`` ("6m", seconds as a number), ``patience``, ``sampler``, ``passes`` (what a comparison
times) and the tables ``[record.BACKEND]`` (see :mod:`autotune.restriction`). Lists multiply out. Where no
problem (or graph) is named, those that the file defines are meant. A key that is not known is an error, with the
nearest valid one suggested.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune import paths
from autotune.contest import DIRECTIONS_OF
from autotune.errors import ConfigError, unknown_name
from autotune.families import Problem, operations_of
from autotune.graphs import AtomSource, Bulk, Crystal, EdgesAlone, GraphSpec, Molecule, Points, StructureFile
from autotune.restriction import Restriction, restrictions_from
from autotune.workload import Workload
from kernelgen.errors import EquituneError
from kernelgen.harmonics import HarmonicsProblem
from kernelgen.problem import TensorProductProblem

SAMPLERS = ("auto", "tpe", "climb", "gp", "random", "brute")
WORKLOAD_KEYS = ("problem", "graph", "operation", "directions", "dtype", "layout", "deterministic")
# A table of workloads may also have its own number of trials a study.
TABLE_KEYS = (*WORKLOAD_KEYS, "trials")
SEARCH_KEYS = ("budget", "trials", "patience", "sampler", "record")
TOP_KEYS = (*WORKLOAD_KEYS, "workload", "problems", "harmonics", "graphs", "passes", *SEARCH_KEYS)
NORMALIZATION_KEYS = ("shared_weights", "irrep_normalization", "path_normalization")
BACKENDS = ("cpu", "cuda")
ATOM_SOURCES = ("crystal", "bulk", "molecule", "points", "structure")
SOURCES = (*ATOM_SOURCES, "edges")
T = TypeVar("T")
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True)
class TuneConfig:
    """Workloads with the budget (seconds for all of it, comparisons included), trials and sampler asked for.

    workload_trials: of workloads whose table gives its own number. patience: trials in a row without a gain that end a
    search. record: by backend, the part of the space to record.
    passes: what a comparison times, of ``autotune.contest.PASSES``; None for those of a model.
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


def config_path(name_or_path: str | Path) -> Path:
    """A config by path, or by name (with or without ``.toml``) in the checkout's or the installed ``configs``."""
    given = Path(name_or_path)
    folder = paths.configs_dir()
    candidates = [given, folder / given.name, folder / f"{given.name}.toml"]
    if given.parent not in (Path("."), Path("configs")):
        candidates = [given]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(path.stem for path in folder.glob("*.toml") if path.stem not in ("problems", "graphs"))
    raise ConfigError(f"no config {str(name_or_path)!r} here; " + unknown_name("name", given.stem, known))


def load_config(name_or_path: str | Path, backend: str | None = None) -> TuneConfig:
    """The config at a path or of a name. ``backend`` (cpu, cuda) picks graphs; by default cuda where torch sees it."""
    path = config_path(name_or_path)
    backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; expected one of {BACKENDS}")
    try:
        return _config(path, _read(path), backend)
    except EquituneError as error:
        raise ConfigError(f"{path}: {error}") from error


def load_problems(path: Path | None = None) -> dict[str, TensorProductProblem]:
    """The named tensor products of ``problems.toml`` (or another such file)."""
    path = path or paths.configs_dir() / "problems.toml"
    return {name: problem_from(name, table) for name, table in _read(path).items() if name != "harmonics"}


def load_harmonics(path: Path | None = None) -> dict[str, HarmonicsProblem]:
    """The named spherical harmonics of ``problems.toml`` (or another such file): tables ``[harmonics.NAME]``."""
    tables = _tables(_read(path or paths.configs_dir() / "problems.toml"), "harmonics")
    return {name: harmonics_from(name, table) for name, table in tables.items()}


def load_graphs(path: Path | None = None) -> dict[str, GraphSpec]:
    """The named graphs of ``graphs.toml`` (or another such file)."""
    path = path or paths.configs_dir() / "graphs.toml"
    return {name: graph_from(name, table, path.parent) for name, table in _read(path).items()}


def problem_from(name: str, table: Any) -> TensorProductProblem:
    """A problem from a table: in1, in2 and filter (channelwise), out (fully connected), or out and instructions."""
    if isinstance(table, Mapping) and "out" in table and "instructions" not in table:
        required: tuple[str, ...] = ("in1", "in2", "out")
        _check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
        shared = table.get("shared_weights", False)
        return TensorProductProblem.fully_connected(*(table[key] for key in required), shared_weights=shared)
    if isinstance(table, Mapping) and "instructions" in table:
        required = ("in1", "in2", "out", "instructions")
        _check_table(table, f"problem {name!r}", (*required, *NORMALIZATION_KEYS), required)
        options = {key: table[key] for key in NORMALIZATION_KEYS if key in table}
        return TensorProductProblem.from_instructions(*(table[key] for key in required), **options)
    required = ("in1", "in2", "filter")
    _check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
    shared = table.get("shared_weights", False)
    return TensorProductProblem.channelwise(*(table[key] for key in required), shared_weights=shared)


def harmonics_from(name: str, table: Any) -> HarmonicsProblem:
    """Harmonics from a table: degrees (``"0-3"``, or a list), normalize and normalization, as of e3nn's function."""
    keys = ("degrees", "normalize", "normalization")
    _check_table(table, f"harmonics {name!r}", keys, required=keys)
    degrees = table["degrees"]
    if isinstance(degrees, str) and (span := re.fullmatch(r"(\d+)-(\d+)", degrees)):
        degrees = list(range(int(span[1]), int(span[2]) + 1))
    if not isinstance(degrees, list):
        raise ConfigError(f"harmonics {name!r}: degrees are {degrees!r}; expected for example '0-3' or [0, 2]")
    return HarmonicsProblem(tuple(degrees), table["normalization"], table["normalize"])


def graph_from(name: str, table: Any, folder: Path) -> GraphSpec:
    """A graph from a table: cutoff, one source of atoms, and optionally repeat; ``folder`` is the file's own.

    Or the number of its ``edges`` alone.
    """
    if isinstance(table, Mapping) and "edges" in table:
        _check_table(table, f"graph {name!r}", ("edges",))
        number = _count(f"graph {name!r}: edges", table["edges"])
        assert number is not None
        return GraphSpec(name, EdgesAlone(number))
    _check_table(table, f"graph {name!r}", ("cutoff", "repeat", *SOURCES), required=("cutoff",))
    given = [source for source in SOURCES if source in table]
    if len(given) != 1:
        raise ConfigError(f"graph {name!r} has {given or 'no source of atoms'}; expected exactly one of {SOURCES}")
    repeat = tuple(table.get("repeat", (1, 1, 1)))
    if len(repeat) != 3 or not all(isinstance(n, int) and n > 0 for n in repeat):
        raise ConfigError(f"graph {name!r}: repeat is {repeat}; expected three positive integers")
    source = _source(f"graph {name!r}: {given[0]}", given[0], table[given[0]], folder)
    return GraphSpec(name, source, _number(f"graph {name!r}: cutoff", table["cutoff"]), repeat)


def parse_duration(value: str | int | float) -> float:
    """Seconds from ``"6m"``, ``"90s"``, ``"1h30m"`` or a number of seconds."""
    text = str(value).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"{value!r} is not a duration; expected for example '90s', '6m' or '1h30m'")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


def _config(path: Path, table: Mapping[str, Any], backend: str) -> TuneConfig:
    _check_table(table, "config", TOP_KEYS)
    local_problems: dict[str, Problem] = {name: problem_from(name, t) for name, t in _tables(table, "problems").items()}
    local_problems |= {name: harmonics_from(name, t) for name, t in _tables(table, "harmonics").items()}
    local_graphs = {name: graph_from(name, t, path.parent) for name, t in _tables(table, "graphs").items()}
    problems, graphs = {**load_problems(), **load_harmonics(), **local_problems}, load_graphs() | local_graphs
    shared = {"problem": list(local_problems), "graph": list(local_graphs)}
    shared |= {key: table[key] for key in WORKLOAD_KEYS if key in table}
    workloads: list[Workload] = []
    own_trials: dict[Workload, int] = {}
    for given in table.get("workload", [{}]):
        _check_table(given, "workload", TABLE_KEYS)
        found = _workloads({**shared, **given}, problems, graphs, backend)
        if (count := _count("workload.trials", given.get("trials"))) is not None:
            own_trials |= {workload: count for workload in found if workload not in workloads}
        workloads += found
    sampler = table.get("sampler", "auto")
    if sampler not in SAMPLERS:
        raise ConfigError(unknown_name("sampler", str(sampler), SAMPLERS))
    trials, patience = (_count(key, table.get(key)) for key in ("trials", "patience"))
    budget = parse_duration(table["budget"]) if "budget" in table else None
    restrictions = restrictions_from(table.get("record", {}))
    passes = _passes(table["passes"], workloads) if "passes" in table else None
    chosen = tuple(dict.fromkeys(workloads))
    return TuneConfig(path, chosen, budget, trials, sampler, patience, restrictions, passes, own_trials)


def by_problem(workloads: Sequence[Workload]) -> list[Workload]:
    """Workloads of one problem behind each other; problems, and what each has, in the order given."""
    problems = list(dict.fromkeys(workload.problem for workload in workloads))
    return sorted(workloads, key=lambda workload: problems.index(workload.problem))


def _passes(value: Any, workloads: Sequence[Workload]) -> tuple[str, ...]:
    """Passes that every workload has the directions for."""
    passes = tuple(dict.fromkeys(_names("passes", value)))
    for name in passes:
        if name not in DIRECTIONS_OF:
            raise ConfigError(unknown_name("pass", name, DIRECTIONS_OF))
        for workload in workloads:
            missing = [direction for direction in DIRECTIONS_OF[name] if direction not in workload.directions]
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
        _check_table(graph, "graph by backend", BACKENDS, required=(backend,))
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


def _tables(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; expected tables [{key}.NAME]")
    return value


def _pick(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(unknown_name(kind, name, known))
    return known[name]


def _names(key: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} is {value!r}; expected a name or a list of names")
    return names


def _count(key: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{key} is {value!r}; expected a positive integer")
    return value


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{what} is {value!r}; expected a positive number")
    return float(value)


def _source(what: str, kind: str, value: Any, folder: Path) -> AtomSource:
    if kind in ("molecule", "structure"):
        if not isinstance(value, str):
            raise ConfigError(f"{what} is {value!r}; expected a text")
        return Molecule(value) if kind == "molecule" else StructureFile(value, str(folder))
    if kind == "points":
        _check_table(value, what, ("number", "density", "seed"), required=("number", "density"))
        return Points(int(value["number"]), _number(what + ".density", value["density"]), int(value.get("seed", 0)))
    if kind == "bulk":
        _check_table(
            value, what, ("name", "crystalstructure", "a", "cubic"), required=("name", "crystalstructure", "a")
        )
        return Bulk(
            value["name"], value["crystalstructure"], _number(what + ".a", value["a"]), value.get("cubic", True)
        )
    _check_table(value, what, ("spacegroup", "cell", "sites"), required=("spacegroup", "cell", "sites"))
    try:
        sites = tuple((str(symbol), float(x), float(y), float(z)) for symbol, x, y, z in value["sites"])
        return Crystal(int(value["spacegroup"]), tuple(float(length) for length in value["cell"]), sites)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: expected sites like ['Zn', 0.29, 0.2, 0.2] and a cell of six numbers") from error


def _check_table(table: Any, what: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{what} is {table!r}; expected a table with {', '.join(known)}")
    for key in table:
        if key not in known:
            raise ConfigError(f"{what}: " + unknown_name("key", key, known))
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f"{what}: missing {', '.join(missing)}; expected {', '.join(required)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
