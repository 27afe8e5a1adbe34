"""Structures by the names of ``configs/graphs.toml``, or files; those of the wheel need no download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import ConfigError, unknown_name
from autotune.workload.config import load_graphs
from autotune.workload.graphs import Bulk, Crystal, Molecule, StructureFile, Water

if TYPE_CHECKING:
    from ase import Atoms

# Random points and edges alone have no elements.
SOURCES = (Crystal, Bulk, Molecule, StructureFile, Water)
# Standard deviation in angstrom. In a perfect crystal forces are zero, so there would be no errors to measure.
RATTLED = 0.05


def structure_names() -> list[str]:
    """Names that :func:`find_atoms` knows, besides files."""
    return [name for name, graph in load_graphs().items() if isinstance(graph.source, SOURCES)]


def find_atoms(name: str) -> Atoms:
    """The atoms of a named graph (a crystal's slightly displaced, always alike), or the last ones of a file."""
    graphs = load_graphs()
    if name not in graphs:
        if Path(name).is_file():
            return _read(name)
        raise ConfigError(f"{unknown_name('structure', name, structure_names())}; a file may also be named")
    graph = graphs[name]
    if not isinstance(graph.source, SOURCES):
        raise ConfigError(f"structure {name!r} has no elements; expected one of {', '.join(structure_names())}")
    atoms = graph.source.atoms().repeat(graph.repeat)
    if isinstance(graph.source, Crystal | Bulk):
        atoms.rattle(RATTLED, seed=0)
    return atoms


def _read(path: str) -> Atoms:
    try:
        return StructureFile(path).atoms()
    except Exception as error:  # whatever ase's readers raise
        raise ConfigError(f"structure file {path} cannot be read by ase ({type(error).__name__}: {error})") from error
