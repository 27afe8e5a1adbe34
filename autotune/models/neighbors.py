"""Neighbours of moving atoms, on the device of a model: exact in each step, searched anew only when needed.

A search with a margin (the skin) finds pairs a little farther apart than the cutoff. As long as no atom has moved by
half the skin since, every pair within the cutoff is among them, and a step only drops those that are too long. On a
CPU matscipy searches, as MACE, NequIP and SevenNet do themselves; on a GPU vesin, without a skin: there a search takes
about as long as a step's own operations.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernelgen.errors import InputError

# In angstrom, by kind of device. On a CPU pairs within 7 are filtered in a third of the time of a search within 6.
SKIN = {"cpu": 1.0, "cuda": 0.0}
# By kind of device: the module that searches, and how to get it.
SEARCHES = {"cpu": ("matscipy", "matscipy"), "cuda": ("vesin_torch", "vesin-torch")}
# Kernels count edges in 32 bits.
_MOST_EDGES = 2**31 - 1


def missing_search(device: torch.device) -> str:
    """Why no neighbours can be found for a device: a package to install; else empty."""
    if device.type not in SEARCHES:
        return f"neighbours are searched on {', '.join(SEARCHES)}, not on {device.type}"
    module, package = SEARCHES[device.type]
    return "" if _is_installed(module) else f"{package} is not installed: pip install {package}"


@functools.cache
def _is_installed(module: str) -> bool:
    """Looked up once: calculators ask in every step."""
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class AtomicGraph:
    """Atoms and the edges between those within the cutoff, each pair in both directions, on the model's device.

    positions [atoms, 3] and cell [3, 3], in angstrom, float64. centers, neighbors [edges]: ascending in ``centers``.
    unit_shifts [edges, 3]: whole numbers of cells. vectors [edges, 3]:
    ``positions[neighbors] + unit_shifts @ cell - positions[centers]``.
    """

    positions: Tensor
    cell: Tensor
    centers: Tensor
    neighbors: Tensor
    unit_shifts: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class _Candidates:
    """Pairs within cutoff and skin, of atoms that were at ``positions`` (host) in ``cell`` with ``pbc``."""

    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    skin: float
    centers: Tensor
    neighbors: Tensor
    unit_shifts: Tensor
    offsets: Tensor

    def serves(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> bool:
        """Whether no pair within the cutoff can be missing."""
        if len(positions) != len(self.positions) or (cell != self.cell).any() or (pbc != self.pbc).any():
            return False
        moved = positions - self.positions
        return bool((np.einsum("ij,ij->i", moved, moved) <= (self.skin / 2) ** 2).all())


class NeighborList:
    """The edges of atoms that move. One for each simulation: it remembers where the atoms were.

    cutoff, skin: in angstrom; no skin: that of the device. searches: how often neighbours were searched so far.
    """

    def __init__(self, cutoff: float, device: torch.device, skin: float | None = None) -> None:
        if missing := missing_search(device):
            raise InputError(missing)
        self.cutoff, self.device = cutoff, device
        self.skin = SKIN[device.type] if skin is None else skin
        self.searches = 0
        self._candidates: _Candidates | None = None
        self._last_cell: np.ndarray | None = None

    def graph(self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> AtomicGraph:
        """The graph of atoms at positions [atoms, 3], float64, in a cell [3, 3] that is periodic along ``pbc`` [3].

        Raises InputError for positions or cells that are not finite, and for a periodic direction without a vector.
        """
        host = np.concatenate([positions, cell])
        if not np.isfinite(host).all():
            bad = np.flatnonzero(~np.isfinite(host).all(axis=1))
            where = f"of atom {bad[0]}" if bad[0] < len(positions) else "of the cell"
            raise InputError(f"a coordinate {where} is not finite; the simulation has gone astray before this step")
        both = torch.from_numpy(host).to(self.device)
        at, cell_on_device = both[: len(positions)], both[len(positions) :]
        if self._candidates is None or not self._candidates.serves(positions, cell, pbc):
            self._candidates = self._searched(positions, cell, pbc, cell_on_device, at)
        pairs = self._candidates
        vectors = at[pairs.neighbors] - at[pairs.centers] + pairs.offsets
        if not pairs.skin:
            return AtomicGraph(at, cell_on_device, pairs.centers, pairs.neighbors, pairs.unit_shifts, vectors)
        near = (vectors.square().sum(-1) < self.cutoff**2).nonzero().squeeze(-1)
        edges = (rows.index_select(0, near) for rows in (pairs.centers, pairs.neighbors, pairs.unit_shifts, vectors))
        return AtomicGraph(at, cell_on_device, *edges)

    def _searched(
        self, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cell_on_device: Tensor, at: Tensor
    ) -> _Candidates:
        """With the skin, unless the cell is another than at the last search: then it will change again."""
        same_cell = self._last_cell is None or bool((cell == self._last_cell).all())
        skin = self.skin if same_cell else 0.0
        box = search_box(positions, cell, pbc)
        search = _by_matscipy if self.device.type == "cpu" else _by_vesin
        centers, neighbors, unit_shifts = search(positions, at, box, pbc, self.cutoff + skin)
        if len(centers) > _MOST_EDGES:
            raise InputError(f"there are {len(centers)} edges; expected at most {_MOST_EDGES}: divide the system")
        self.searches += 1
        self._last_cell = cell.copy()
        offsets = unit_shifts @ cell_on_device
        kept = positions.copy(), self._last_cell, pbc.copy(), skin
        return _Candidates(*kept, centers, neighbors, unit_shifts, offsets)

    def __deepcopy__(self, memo: Any) -> NeighborList:
        return NeighborList(self.cutoff, self.device, self.skin)

    def __reduce__(self) -> tuple:
        return NeighborList, (self.cutoff, self.device, self.skin)


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


def _by_matscipy(
    positions: np.ndarray, at: Tensor, box: np.ndarray, pbc: np.ndarray, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    from matscipy.neighbours import neighbour_list

    found = neighbour_list("ijS", positions=positions, cell=box, pbc=pbc, cutoff=cutoff)
    centers, neighbors, unit_shifts = (torch.from_numpy(rows) for rows in found)
    return centers.long(), neighbors.long(), unit_shifts.to(at)


def _by_vesin(
    positions: np.ndarray, at: Tensor, box: np.ndarray, pbc: np.ndarray, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    from vesin_torch import NeighborList as Search

    search = Search(cutoff, full_list=True, sorted=True)
    found = search.compute(at, torch.from_numpy(box).to(at), torch.from_numpy(pbc), "ijS")
    centers, neighbors, unit_shifts = found
    return centers, neighbors, unit_shifts.to(at)
