"""Structures that show faults of a potential, drawn from the elements that a model knows; and how they get smaller.

    structures = draw(species=(1, 6, 8), cutoff=5.0, seed=0)      # {"molecule": Atoms, "crystal": Atoms, ...}

Each is small, because each is evaluated some twenty times by every path. They mean nothing chemically: a potential must
be the same wherever it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc111
from ase.build import molecule as known_molecule
from ase.collections import g2
from ase.data import chemical_symbols, covalent_radii

from autotune.errors import ConfigError
from autotune.models.whole_model import find_atoms

# The first whose elements a model knows.
_MOLECULES = ("CH3CONH2", "CH3CH2OH", "H2CO", "CH3SiH3", "SO2", "H2O", "NH3", "CH4", "NaCl", "LiF", "N2", "O2", "H2")
# Elements of a liquid, if a model knows them.
_COMMON = (8, 1, 6, 7, 14, 26, 13, 29)
# Standard deviation in angstrom: in a perfect crystal forces are zero, which shows nothing.
_RATTLED = 0.06
# How many times the sum of covalent radii neighbours are apart.
_APART = 1.15
# A vector's lengths in the skewed cell, by those of the crystal; its determinant is negative.
_SKEW = np.array([[0, 1, 0], [1, 2, 0], [-1, 1, 1]])
# Of a chemical element that is heavier than ASE's table.
_LARGEST_RADIUS = 1.7
_LIQUID = 16
# More elements than this come as several structures.
_ELEMENTS_EACH = 50


def draw(species: Sequence[int], cutoff: float, seed: int) -> dict[str, Atoms]:
    """Structures of these atomic numbers by their names; equal arguments give equal ones.

    cutoff: the model's largest distance of neighbours, in angstrom.
    """
    random = np.random.default_rng(seed)
    mixed = [int(number) for number in random.permutation(np.asarray(species))]
    first, second = mixed[0], mixed[-1]
    kinds = list(dict.fromkeys([*[number for number in _COMMON if number in species][:3], *mixed]))[:4]
    crystal = _crystal(first, second)
    drawn = {
        "molecule": _molecule(species, random),
        "crystal": _rattled(crystal, random),
        "slab": _slab(first, second, cutoff, random),
        "liquid": _packed([kinds[place % len(kinds)] for place in range(_LIQUID)], random, pbc=True),
        "tiny cell": _tiny(first, second),
        "skewed cell": _skewed(crystal, random),
        "isolated atom": Atoms([chemical_symbols[second]], [[0.1, 0.2, 0.3]]),
        "compressed": _compressed(crystal, random),
        "no edges": _apart(first, second, cutoff),
    }
    groups = [mixed[begin : begin + _ELEMENTS_EACH] for begin in range(0, len(mixed), _ELEMENTS_EACH)]
    for place, numbers in enumerate(groups, 1):
        name = "all elements" if len(groups) == 1 else f"all elements, {place} of {len(groups)}"
        drawn[name] = _packed(numbers, random, pbc=True)
    return drawn


def read(names: Sequence[str]) -> dict[str, Atoms]:
    """A user's structures: files that ase reads, or names of ``configs/graphs.toml``. ConfigError for others."""
    found: dict[str, Atoms] = {}
    for name in names:
        short = Path(name).name
        if short in found:
            raise ConfigError(f"two structures are called {short!r}; expected files of different names")
        found[short] = find_atoms(name)
    return found


def radius(number: int) -> float:
    """Covalent, in angstrom."""
    return float(covalent_radii[number]) if number < len(covalent_radii) else _LARGEST_RADIUS


def _distance(first: int, second: int) -> float:
    return _APART * (radius(first) + radius(second))


def _rattled(atoms: Atoms, random: np.random.Generator) -> Atoms:
    moved = atoms.copy()
    moved.positions += _RATTLED * random.normal(size=moved.positions.shape)
    return moved


def _molecule(species: Sequence[int], random: np.random.Generator) -> Atoms:
    known = {chemical_symbols[number] for number in species}
    for name in _MOLECULES:
        if name in g2.names and set(found := known_molecule(name).get_chemical_symbols()) <= known and found:
            return _rattled(known_molecule(name), random)
    return _packed([int(number) for number in random.choice(np.asarray(species), 5)], random, pbc=False)


def _crystal(first: int, second: int) -> Atoms:
    """Rock salt, or face-centred cubic of one element."""
    apart = _distance(first, second)
    if first == second:
        return bulk(chemical_symbols[first], "fcc", a=2**0.5 * apart, cubic=True)
    name = chemical_symbols[first] + chemical_symbols[second]
    return bulk(name, "rocksalt", a=2 * apart, cubic=True)


def _slab(first: int, second: int, cutoff: float, random: np.random.Generator) -> Atoms:
    """Periodic in two directions, with the other element on one side."""
    slab = fcc111(chemical_symbols[first], (2, 2, 2), a=2**0.5 * _distance(first, second), vacuum=0.6 * cutoff)
    slab.numbers[-2:] = second
    slab.pbc = [True, True, False]
    return _rattled(slab, random)


def _packed(numbers: Sequence[int], random: np.random.Generator, *, pbc: bool) -> Atoms:
    """Atoms on a shaken cubic grid that is as wide as the mean of their sizes asks for."""
    side = int(np.ceil(len(numbers) ** (1 / 3) - 1e-9))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    places = random.permutation(grid)[: len(numbers)].astype(float)
    width = 2 * _APART * float(np.mean([radius(number) for number in numbers]))
    places = width * (places + random.uniform(-0.12, 0.12, size=places.shape))
    atoms = Atoms(numbers=list(numbers), positions=places)
    if pbc:
        atoms.set_cell([side * width] * 3)
        atoms.pbc = True
    return atoms


def _tiny(first: int, second: int) -> Atoms:
    """Two atoms in a cell in which each meets its own images."""
    apart = _distance(first, second)
    cell = np.diag([1.05, 1.2, 2.1]) * apart
    places = [[0.0, 0.0, 0.0], [0.11 * apart, 0.23 * apart, 0.97 * apart]]
    return Atoms(numbers=[first, second], positions=places, cell=cell, pbc=True)


def _skewed(crystal: Atoms, random: np.random.Generator) -> Atoms:
    """The same crystal in a strongly skewed, left-handed cell; some atoms are outside it."""
    skewed = _rattled(crystal, random)
    skewed.set_cell(_SKEW @ skewed.cell.array)
    return skewed


def _compressed(crystal: Atoms, random: np.random.Generator) -> Atoms:
    """To the repulsive wall: neighbours at three quarters of their distance."""
    small = crystal.copy()
    small.set_cell(0.75 * small.cell.array, scale_atoms=True)
    return _rattled(small, random)


def _apart(first: int, second: int, cutoff: float) -> Atoms:
    """Three atoms in a periodic cell, none of which is a neighbour of another."""
    places = 2 * cutoff * np.array([[0.0, 0.0, 0.0], [1.0, 0.1, 0.2], [0.2, 1.0, 0.9]])
    return Atoms(numbers=[first, second, first], positions=places, cell=[4.0 * cutoff] * 3, pbc=True)


def smallest(atoms: Atoms, fails: Callable[[Atoms], bool], tries: int = 24) -> Atoms:
    """Take atoms away as long as ``fails`` stays true, halves first, then fewer, then one after another.

    tries: at most so many smaller structures are asked about.
    """
    part = max(len(atoms) // 2, 1)
    while len(atoms) > 1 and tries:
        found = None
        for begin in range(0, len(atoms), part):
            kept = [place for place in range(len(atoms)) if not begin <= place < begin + part]
            if not kept or not tries:
                break
            tries -= 1
            if fails(atoms[kept]):
                found = atoms[kept]
                break
        if found is not None:
            atoms, part = found, min(part, max(len(found) // 2, 1))
        elif part == 1:
            break
        else:
            part = max(part // 2, 1)
    return atoms


def as_record(atoms: Atoms) -> dict[str, Any]:
    """What a structure is made of, in angstrom, so that it can be built again by :func:`from_record`."""
    return {
        "formula": atoms.get_chemical_formula(),
        "numbers": atoms.numbers.tolist(),
        "positions": atoms.positions.tolist(),
        "cell": atoms.cell.array.tolist(),
        "pbc": atoms.pbc.tolist(),
    }


def from_record(record: dict[str, Any]) -> Atoms:
    return Atoms(**{name: record[name] for name in ("numbers", "positions", "cell", "pbc")})
