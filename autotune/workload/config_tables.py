"""Convert TOML tables to problems, harmonics and graphs as frozen values, or raise ConfigError.

All tables of ``configs/problems.toml`` and ``configs/graphs.toml`` count; in other configs those under ``problems``,
``harmonics``, ``vectors`` and ``graphs``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import paths
from autotune.errors import ConfigError, unknown_name
from autotune.workload.graphs import AtomSource, Bulk, Crystal, EdgesAlone, GraphSpec, Molecule, Points, StructureFile
from autotune.workload.kinds.base import Problem
from kernelgen.problem.edge_vectors import SEPARATOR, VectorProblem
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem

NORMALIZATION_KEYS = ("shared_weights", "irrep_normalization", "path_normalization")
# Tables of problems that are not products.
OTHERS = ("harmonics", "vectors")
SOURCES = ("crystal", "bulk", "molecule", "points", "structure", "edges")


def load_problems(path: Path | None = None) -> dict[str, TensorProductProblem]:
    """The named tensor products of ``problems.toml`` (or another such file)."""
    path = path or paths.configs_dir() / "problems.toml"
    return {name: problem_from(name, table) for name, table in read_toml(path).items() if name not in OTHERS}


def load_harmonics(path: Path | None = None) -> dict[str, HarmonicsProblem]:
    """The named spherical harmonics of ``problems.toml`` (or another such file): tables ``[harmonics.NAME]``."""
    tables = tables_of(read_toml(path or paths.configs_dir() / "problems.toml"), "harmonics")
    return {name: harmonics_from(name, table) for name, table in tables.items()}


def load_vectors(path: Path | None = None) -> dict[str, VectorProblem]:
    """The named products of harmonics of vectors of ``problems.toml``: tables ``[vectors.NAME]``."""
    tables = tables_of(read_toml(path or paths.configs_dir() / "problems.toml"), "vectors")
    parts: dict[str, Problem] = {**load_problems(path), **load_harmonics(path)}
    return {name: vectors_from(name, table, parts) for name, table in tables.items()}


def load_all() -> dict[str, Problem]:
    """All named problems, of every kind."""
    return {**load_problems(), **load_harmonics(), **load_vectors()}


def find_problem(text: str) -> Problem:
    """A problem by its name in ``problems.toml`` or by its key; ConfigError with the nearest name otherwise."""
    if "|" in text:
        if SEPARATOR in text:
            return VectorProblem.from_key(text)
        return HarmonicsProblem.from_key(text) if text.startswith("sh|") else TensorProductProblem.from_key(text)
    problems = load_all()
    if text not in problems:
        raise ConfigError(unknown_name("problem", text, problems))
    return problems[text]


def load_graphs(path: Path | None = None) -> dict[str, GraphSpec]:
    """The named graphs of ``graphs.toml`` (or another such file)."""
    path = path or paths.configs_dir() / "graphs.toml"
    return {name: graph_from(name, table, path.parent) for name, table in read_toml(path).items()}


def problem_from(name: str, table: Any) -> TensorProductProblem:
    """A problem from a table: in1, in2 and filter (channelwise), out (fully connected), or out and instructions."""
    if isinstance(table, Mapping) and "out" in table and "instructions" not in table:
        required: tuple[str, ...] = ("in1", "in2", "out")
        check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
        shared = table.get("shared_weights", False)
        return TensorProductProblem.fully_connected(*(table[key] for key in required), shared_weights=shared)
    if isinstance(table, Mapping) and "instructions" in table:
        required = ("in1", "in2", "out", "instructions")
        check_table(table, f"problem {name!r}", (*required, *NORMALIZATION_KEYS), required)
        options = {key: table[key] for key in NORMALIZATION_KEYS if key in table}
        return TensorProductProblem.from_instructions(*(table[key] for key in required), **options)
    required = ("in1", "in2", "filter")
    check_table(table, f"problem {name!r}", (*required, "shared_weights"), required)
    shared = table.get("shared_weights", False)
    return TensorProductProblem.channelwise(*(table[key] for key in required), shared_weights=shared)


def harmonics_from(name: str, table: Any) -> HarmonicsProblem:
    """Harmonics from a table: degrees (``"0-3"``, or a list), normalize and normalization, as of e3nn's function."""
    keys = ("degrees", "normalize", "normalization")
    check_table(table, f"harmonics {name!r}", keys, required=keys)
    degrees = table["degrees"]
    if isinstance(degrees, str) and (span := re.fullmatch(r"(\d+)-(\d+)", degrees)):
        degrees = list(range(int(span[1]), int(span[2]) + 1))
    if not isinstance(degrees, list):
        raise ConfigError(f"harmonics {name!r}: degrees are {degrees!r}; expected for example '0-3' or [0, 2]")
    return HarmonicsProblem(tuple(degrees), table["normalization"], table["normalize"])


def vectors_from(name: str, table: Any, parts: Mapping[str, Problem]) -> VectorProblem:
    """A product of harmonics from a table: names of the ``product`` and of the ``harmonics``, its second input."""
    keys = ("product", "harmonics")
    check_table(table, f"vectors {name!r}", keys, required=keys)
    for key, kind in (("product", TensorProductProblem), ("harmonics", HarmonicsProblem)):
        if not isinstance(parts.get(str(table[key])), kind):
            known = [part for part, problem in parts.items() if isinstance(problem, kind)]
            raise ConfigError(f"vectors {name!r}: " + unknown_name(key, str(table[key]), known))
    product, harmonics = (parts[table[key]] for key in keys)
    assert isinstance(product, TensorProductProblem) and isinstance(harmonics, HarmonicsProblem)
    return VectorProblem(product, harmonics)


def graph_from(name: str, table: Any, folder: Path) -> GraphSpec:
    """A graph from a table: cutoff, one source of atoms, and optionally repeat; ``folder`` contains the file.

    Alternatively only the number of ``edges``.
    """
    if isinstance(table, Mapping) and "edges" in table:
        check_table(table, f"graph {name!r}", ("edges",))
        number = count_of(f"graph {name!r}: edges", table["edges"])
        assert number is not None
        return GraphSpec(name, EdgesAlone(number))
    check_table(table, f"graph {name!r}", ("cutoff", "repeat", *SOURCES), required=("cutoff",))
    given = [source for source in SOURCES if source in table]
    if len(given) != 1:
        raise ConfigError(f"graph {name!r} has {given or 'no source of atoms'}; expected exactly one of {SOURCES}")
    repeat = tuple(table.get("repeat", (1, 1, 1)))
    if len(repeat) != 3 or not all(isinstance(n, int) and n > 0 for n in repeat):
        raise ConfigError(f"graph {name!r}: repeat is {repeat}; expected three positive integers")
    source = _source(f"graph {name!r}: {given[0]}", given[0], table[given[0]], folder)
    return GraphSpec(name, source, number_of(f"graph {name!r}: cutoff", table["cutoff"]), repeat)


def tables_of(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; expected tables [{key}.NAME]")
    return value


def count_of(key: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{key} is {value!r}; expected a positive integer")
    return value


def number_of(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{what} is {value!r}; expected a positive number")
    return float(value)


def _source(what: str, kind: str, value: Any, folder: Path) -> AtomSource:
    if kind in ("molecule", "structure"):
        if not isinstance(value, str):
            raise ConfigError(f"{what} is {value!r}; expected a text")
        return Molecule(value) if kind == "molecule" else StructureFile(value, str(folder))
    if kind == "points":
        check_table(value, what, ("number", "density", "seed"), required=("number", "density"))
        number, seed = count_of(what + ".number", value["number"]), value.get("seed", 0)
        if number is None or isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"{what}.seed is {seed!r}; expected an integer that is not negative")
        return Points(number, number_of(what + ".density", value["density"]), seed)
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


def check_table(table: Any, what: str, known: Sequence[str], required: Sequence[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{what} is {table!r}; expected a table with {', '.join(known)}")
    for key in table:
        if key not in known:
            raise ConfigError(f"{what}: " + unknown_name("key", key, known))
    missing = [key for key in required if key not in table]
    if missing:
        raise ConfigError(f"{what}: missing {', '.join(missing)}; expected {', '.join(required)}")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
