"""Neighbours of moving atoms, on the device of a model: exact in each step, searched anew only when needed.

A search with a margin (the skin) finds pairs a little farther apart than the cutoff, the candidates. Until atoms have
moved too far, or the cell has shrunk too much, every pair within the cutoff is among them, and a step only drops those
that are too long. On a CPU matscipy searches, as MACE, NequIP and SevenNet do themselves; on a GPU vesin.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernelgen.errors import InputError

# In angstrom. On a CPU pairs within 7 are filtered in a third of the time of a search within 6.
SKIN = 1.0
# By kind of device: the module that searches, and how to get it.
SEARCHES = {"cpu": ("matscipy", "matscipy"), "cuda": ("vesin_torch", "vesin-torch")}
# Kernels count edges in 32 bits.
_MOST_EDGES = 2**31 - 1


def missing_search(device: torch.device) -> str:
    """Why no neighbours can be found for a device: a package to install; else empty."""
    if device.type not in SEARCHES:
        return f"neighbours are searched on {', '.join(SEARCHES)}, not on {device.type}"
    module, package = SEARCHES[device.type]
    return "" if _found_spec(module) else f"{package} is not installed: pip install {package}"


# Looked up once: calculators ask in every step.
_found_spec = functools.cache(importlib.util.find_spec)


@dataclass(frozen=True)
class AtomicGraph:
    """Atoms and the edges between those within the cutoff, each pair in both directions, on the model's device.

    positions [atoms, 3] and cell [3, 3], of a batch [graphs, 3, 3], in angstrom, float64; pbc [3]. centers, neighbors
    [edges]: ascending in ``centers``. unit_shifts [edges, 3]: whole numbers of cells; offsets [edges, 3]: the same in
    angstrom. vectors [edges, 3]: ``positions[neighbors] + offsets - positions[centers]``.
    """

    positions: Tensor
    cell: Tensor
    pbc: Tensor
    centers: Tensor
    neighbors: Tensor
    unit_shifts: Tensor
    offsets: Tensor
    vectors: Tensor

    @property
    def edge_index(self) -> Tensor:
        """[2, edges]: centers, then neighbors."""
        return torch.stack((self.centers, self.neighbors))


class Frame(NamedTuple):
    """Atoms on the host: positions [atoms, 3] and cell [3, 3] in angstrom, float64; periodic along ``pbc`` [3]."""

    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray


class Batch(NamedTuple):
    """Atoms of systems on the device: positions [atoms, 3] and cells [systems, 3, 3] in angstrom."""

    positions: Tensor
    cells: Tensor

    def in_double(self) -> tuple[Tensor, Tensor]:
        return self.positions.double(), self.cells.double()


@dataclass(frozen=True)
class Candidates:
    """Pairs [pairs] nearer than ``reach``, of atoms that were at ``positions`` (host) in ``cell`` with ``pbc``."""

    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    reach: float
    centers: Tensor
    neighbors: Tensor
    unit_shifts: Tensor

    def serve(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> bool:
        """Whether no pair within the cutoff can be missing.

        A pair that is missing was at least ``reach`` apart. A change of the cell that all atoms follow takes no pair
        nearer than its least singular value times that, and each atom's own way at most its length nearer.
        """
        if len(positions) != len(self.positions) or (pbc != self.pbc).any():
            return False
        least, followed = 1.0, self.positions
        if (cell != self.cell).any():
            if np.linalg.matrix_rank(self.cell) < 3 or not np.isfinite(cell).all():
                return False
            strain = np.linalg.solve(self.cell, cell)
            least, followed = float(np.linalg.svd(strain, compute_uv=False)[-1]), self.positions @ strain
        moved = positions - followed
        way = math.sqrt(float(np.einsum("ij,ij->i", moved, moved).max(initial=0.0)))
        return least * self.reach - 2 * way >= cutoff

    def vectors(self, positions: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Offsets and vectors [pairs, 3] of atoms that are at ``positions`` in ``cell``, on the device."""
        offsets = self.unit_shifts @ cell
        return offsets, positions[self.neighbors] - positions[self.centers] + offsets

    def edges(self, atoms: Frame, cutoff: float) -> int:
        """How many pairs are within the cutoff; waits for the device."""
        there = (torch.from_numpy(values).to(self.unit_shifts.device) for values in (atoms.positions, atoms.cell))
        return int((self.vectors(*there)[1].square().sum(-1) < cutoff**2).sum())


class NeighborList:
    """The edges of atoms that move. One for each simulation: it remembers where the atoms were.

    cutoff, skin: in angstrom. searches: how often neighbours were searched so far.
    """

    def __init__(self, cutoff: float, device: torch.device, skin: float = SKIN) -> None:
        if missing := missing_search(device):
            raise InputError(missing)
        self.cutoff, self.device, self.skin = cutoff, device, skin
        self.searches = 0
        self._search: Search = (MatscipySearch if device.type == "cpu" else VesinSearch)(cutoff + skin)
        self._candidates: Candidates | None = None

    def graph(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> AtomicGraph:
        """The graph of atoms at positions [atoms, 3], float64, in a cell [3, 3] that is periodic along ``pbc`` [3].

        Raises InputError for positions or cells that are not finite, and for a periodic direction without a vector.
        """
        pairs = self.candidates(positions, cell, pbc)
        both = torch.from_numpy(np.concatenate([positions, cell])).to(self.device)
        at, cell_there = both[: len(positions)], both[len(positions) :]
        offsets, vectors = pairs.vectors(at, cell_there)
        rows = (pairs.centers, pairs.neighbors, pairs.unit_shifts, offsets, vectors)
        return _within(self.cutoff, at, cell_there, pbc, rows)

    def candidates(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> Candidates:
        """Those of the last search, if they serve; the errors of :meth:`graph`."""
        found = self._candidates
        if found is None or not found.serve(positions, cell, pbc, self.cutoff):
            self._candidates = found = self.searched(positions, cell, pbc)
        return found

    def searched(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> Candidates:
        """Those of a new search; the errors of :meth:`graph`."""
        for values, name in ((positions, "atom {}"), (cell, "the cell")):
            bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if len(bad):
                where = name.format(bad[0])
                raise InputError(f"a coordinate of {where} is not finite; the simulation has gone astray before")
        box = search_box(positions, cell, pbc)
        pairs = self._search(positions, box, pbc, self.device)
        if len(pairs[0]) > _MOST_EDGES:
            raise InputError(f"there are {len(pairs[0])} edges; expected at most {_MOST_EDGES}: divide the system")
        self.searches += 1
        return Candidates(positions.copy(), cell.copy(), pbc.copy(), self.cutoff + self.skin, *pairs)

    def __deepcopy__(self, memo: Any) -> NeighborList:
        return NeighborList(self.cutoff, self.device, self.skin)

    def __reduce__(self) -> tuple[Any, ...]:
        return NeighborList, (self.cutoff, self.device, self.skin)


def _within(cutoff: float, positions: Tensor, cell: Tensor, pbc: np.ndarray, rows: tuple[Tensor, ...]) -> AtomicGraph:
    """The graph of those pairs that are within the cutoff. rows: of pairs, centers to vectors as a graph has them."""
    near = (rows[-1].square().sum(-1) < cutoff**2).nonzero().squeeze(-1)
    periodic = torch.from_numpy(pbc).to(positions.device)
    return AtomicGraph(positions, cell, periodic, *(row.index_select(0, near) for row in rows))


@dataclass(frozen=True)
class BatchCandidates:
    """Candidates of a batch's systems, on the device, beside where their atoms were.

    positions [atoms, 3] and cells [systems, 3, 3] in float64, inverses: of the cells. reach [systems]: all pairs that
    were nearer are candidates. of_atoms [atoms], of_pairs [pairs]: numbers of systems. centers, neighbors [pairs]:
    numbers of atoms in the batch. unit_shifts [pairs, 3].
    """

    positions: Tensor
    cells: Tensor
    inverses: Tensor
    reach: Tensor
    of_atoms: Tensor
    of_pairs: Tensor
    centers: Tensor
    neighbors: Tensor
    unit_shifts: Tensor

    @classmethod
    def empty(cls, atoms: int, systems: int, pairs: int, device: torch.device) -> BatchCandidates:
        """Room for so many."""
        zeros = functools.partial(torch.zeros, device=device)
        return cls(
            positions=zeros(atoms, 3, dtype=torch.float64),
            cells=zeros(systems, 3, 3, dtype=torch.float64),
            inverses=zeros(systems, 3, 3, dtype=torch.float64),
            reach=zeros(systems, dtype=torch.float64),
            of_atoms=zeros(atoms, dtype=torch.long),
            of_pairs=zeros(pairs, dtype=torch.long),
            centers=zeros(pairs, dtype=torch.long),
            neighbors=zeros(pairs, dtype=torch.long),
            unit_shifts=zeros(pairs, 3, dtype=torch.float64),
        )

    def put(self, given: object) -> None:
        """Copy what others have on a device to the first rows; positions of further atoms become zero."""
        self.positions.zero_()
        for name, rows in vars(given).items():
            if isinstance(rows, Tensor):
                getattr(self, name)[: len(rows)] = rows

    def serve(self, positions: Tensor, cells: Tensor, cutoff: float) -> Tensor:
        """Whether no pair within the cutoff can be missing, [systems].

        As :meth:`Candidates.serve` says, with a bound below the least singular value of a strain 1 + d: 1 - |d|.
        """
        change = self.inverses @ (cells - self.cells)
        followed = self.positions + _rows_times(self.positions, change, self.of_atoms)
        moved = (positions - followed).square().sum(-1)
        way = moved.new_zeros(len(cells)).scatter_reduce_(0, self.of_atoms, moved, "amax").sqrt()
        least = 1 - change.square().sum((-2, -1)).sqrt()
        return least * self.reach - 2 * way >= cutoff

    def vectors(self, positions: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Offsets and vectors [pairs, 3] of atoms that are at ``positions`` in ``cells``."""
        offsets = _rows_times(self.unit_shifts, cells, self.of_pairs)
        return offsets, positions[self.neighbors] - positions[self.centers] + offsets

    def edges(self, atoms: Batch, cutoff: float) -> int:
        """How many pairs are within the cutoff; waits for the device."""
        return int((self.vectors(*atoms.in_double())[1].square().sum(-1) < cutoff**2).sum())


class BatchNeighbors:
    """The edges of a batch's systems as their atoms move; those of a system are searched anew only when needed.

    cutoff: in angstrom. searches: of single systems, so far.
    """

    def __init__(self, cutoff: float, device: torch.device) -> None:
        self.list = NeighborList(cutoff, device)
        self.last: BatchCandidates | None = None
        self._found: list[Candidates] = []
        self._sizes: list[int] = []
        self._pbc = np.zeros(3, dtype=bool)

    @property
    def searches(self) -> int:
        return self.list.searches

    def graph(self, positions: Tensor, cells: Tensor, pbc: np.ndarray, system: Tensor, sizes: list[int]) -> AtomicGraph:
        """The graph of positions [atoms, 3] and cells [systems, 3, 3] in float64, periodic along ``pbc`` [3].

        system [atoms]: of each atom, ascending. sizes: atoms of each system. Waits for the device. Raises InputError
        for what is not finite, and for a periodic direction without a vector.
        """
        pairs = self.candidates(positions, cells, pbc, system, sizes)
        rows = (pairs.centers, pairs.neighbors, pairs.unit_shifts, *pairs.vectors(positions, cells))
        return _within(self.list.cutoff, positions, cells, pbc, rows)

    def candidates(
        self, positions: Tensor, cells: Tensor, pbc: np.ndarray, system: Tensor, sizes: list[int]
    ) -> BatchCandidates:
        """Those of the last searches, of systems that they serve, and of new ones; of :meth:`graph`'s arguments."""
        last, self.last = self.last, None  # while some are searched, which may fail
        serving: dict[int, Candidates] = {}
        if last is not None and sizes == self._sizes and (pbc == self._pbc).all():
            serves = last.serve(positions, cells, self.list.cutoff).tolist()
            serving = {number: pairs for number, pairs in enumerate(self._found) if serves[number]}
        if last is None or len(serving) < len(sizes):
            self._sizes, self._pbc = sizes, pbc
            last = self._searched(serving, positions, cells, system)
        self.last = last
        return last

    def _searched(
        self, serving: dict[int, Candidates], positions: Tensor, cells: Tensor, system: Tensor
    ) -> BatchCandidates:
        """Those of all systems in one batch, after a search of all but ``serving``."""
        device, starts = positions.device, np.cumsum([0, *self._sizes])
        on_host, cells_there = positions.cpu().numpy(), cells.cpu().numpy()
        self._found = found = [
            serving.get(number) or self.list.searched(on_host[start:end], cells_there[number], self._pbc)
            for number, (start, end) in enumerate(itertools.pairwise(starts))
        ]
        counts = torch.tensor([len(pairs.centers) for pairs in found])
        of_pairs = torch.arange(len(found)).repeat_interleave(counts).to(device)
        first = torch.from_numpy(starts).to(device)[of_pairs]
        searched = {
            "positions": np.concatenate([pairs.positions for pairs in found]),
            "cells": np.stack([pairs.cell for pairs in found]),
            "inverses": np.stack([_inverse(pairs.cell) for pairs in found]),
            "reach": np.array([pairs.reach for pairs in found]),
        }
        return BatchCandidates(
            **{name: torch.from_numpy(rows).to(device) for name, rows in searched.items()},
            of_atoms=system.clone(),
            of_pairs=of_pairs,
            centers=torch.cat([pairs.centers for pairs in found]) + first,
            neighbors=torch.cat([pairs.neighbors for pairs in found]) + first,
            unit_shifts=torch.cat([pairs.unit_shifts for pairs in found]),
        )


def _inverse(cell: np.ndarray) -> np.ndarray:
    """Of a cell without volume a matrix by which any change of it is too large."""
    return np.linalg.inv(cell) if np.linalg.matrix_rank(cell) == 3 else np.full((3, 3), 1e30)


def _rows_times(rows: Tensor, matrices: Tensor, of: Tensor) -> Tensor:
    """Each row [rows, 3] times the matrix [matrices, 3, 3] that is its own, of whose number ``of`` knows."""
    if len(matrices) == 1:
        return rows @ matrices[0]
    return (rows[:, :, None] * matrices[of]).sum(1)


def search_box(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """A cell [3, 3] with the vectors of periodic directions, and others that hold all atoms in the other directions."""
    box = np.where(pbc[:, None], cell, 0.0)
    lengths = np.linalg.norm(box, axis=1)
    if (lengths[pbc] == 0).any() or np.linalg.matrix_rank(box) < pbc.sum():
        raise InputError(f"the cell {cell.tolist()} has no volume along its periodic directions {pbc.tolist()}")
    if pbc.all():
        return box
    from ase.geometry import complete_cell

    box = complete_cell(box)
    extent = np.ptp(positions, axis=0) if len(positions) else np.zeros(3)
    box[~pbc] *= np.linalg.norm(extent) + 1
    return box


# Centers, neighbors and unit shifts [pairs, 3] (float64) of all pairs nearer than a cutoff, ascending in the first.
Pairs = tuple[Tensor, Tensor, Tensor]
Search = Callable[[np.ndarray, np.ndarray, np.ndarray, torch.device], Pairs]


class MatscipySearch:
    def __init__(self, cutoff: float) -> None:
        self.cutoff = cutoff

    def __call__(self, positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, device: torch.device) -> Pairs:
        from matscipy.neighbours import neighbour_list

        found = neighbour_list("ijS", positions=positions, cell=box, pbc=pbc, cutoff=self.cutoff)
        centers, neighbors, unit_shifts = (torch.from_numpy(rows).to(device) for rows in found)
        return centers.long(), neighbors.long(), unit_shifts.double()


class VesinSearch:
    """Keeps vesin's buffers between searches: to make them takes longer than a search.

    Their size is vesin's own guess, or by environment; in cells that are far smaller than the cutoff it is too small.
    """

    def __init__(self, cutoff: float) -> None:
        self.cutoff, self._most = cutoff, 0
        self._vesin = self._new()

    def _new(self) -> Any:
        from vesin_torch import NeighborList as Vesin

        return Vesin(self.cutoff, full_list=True, sorted=True)

    def __call__(self, positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, device: torch.device) -> Pairs:
        at, there = (torch.from_numpy(values).to(device) for values in (positions, box))
        return self.pairs(at, there, torch.from_numpy(pbc))

    def pairs(self, positions: Tensor, box: Tensor, pbc: Tensor) -> Pairs:
        """Of positions and box in float64 on the device, and ``pbc`` [3] on the host."""
        while True:
            try:
                found = self._vesin.compute(positions, box, pbc, "ijS")
                break
            except RuntimeError as error:
                if _VESINS_MOST not in str(error) or self._most > _MOST_NEIGHBORS:
                    raise
                self._most = 4 * (self._most or 512)
                os.environ[_VESINS_MOST] = str(self._most)
                self._vesin = self._new()
        centers, neighbors, unit_shifts = found
        return centers.long(), neighbors.long(), unit_shifts.double()


# How many neighbors of an atom vesin has room for on a GPU.
_VESINS_MOST = "VESIN_CUDA_MAX_PAIRS_PER_POINT"
_MOST_NEIGHBORS = 1 << 20
