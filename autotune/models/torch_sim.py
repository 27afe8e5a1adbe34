"""torch-sim's models with Equitune in them: many systems at a time, in one batch.

The class of a package's models is torch-sim's (``torch_sim.models.mace.MaceModel`` of 0.3) or the package's own
(``mace.calculators.mace_torchsim``, ``sevenn.torchsim``, ``nequip.integrations.torchsim``): all of them hold the
package's model as ``model``. In each step they make its inputs anew: neighbours, species, a batch. Here what does not
change while atoms move is kept, and neighbours are searched within a skin.
"""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel
from autotune.models.capture import capture as captured
from autotune.models.neighbors import AtomicGraph, Candidates, NeighborList, missing_search
from autotune.models.package import Package
from autotune.models.stand_ins import Acceleration
from autotune.models.whole_model import PACKAGES
from kernelgen.errors import InputError

LOG = logging.getLogger("equitune")


class BatchNeighbors:
    """The edges of a batch's systems as their atoms move; those of a system are searched anew only when needed.

    cutoff: in angstrom. searches: of single systems, so far.
    """

    def __init__(self, cutoff: float, device: torch.device) -> None:
        self.list = NeighborList(cutoff, device)
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
        serving: dict[int, Candidates] = {}
        if self._found and sizes == self._sizes and (pbc == self._pbc).all():
            serves = self._serve(positions, cells, system).tolist()
            serving = {number: pairs for number, pairs in enumerate(self._found) if serves[number]}
        if len(serving) < len(sizes):
            self._found = []  # while others are searched, which may fail
            self._sizes, self._pbc = sizes, pbc
            self._search(serving, positions, cells)
        offsets = _rows_times(self._unit_shifts, cells, self._system)
        vectors = positions[self._neighbors] - positions[self._centers] + offsets
        near = (vectors.square().sum(-1) < self.list.cutoff**2).nonzero().squeeze(-1)
        rows = (self._centers, self._neighbors, self._unit_shifts, offsets, vectors)
        periodic = torch.from_numpy(pbc).to(positions.device)
        return AtomicGraph(positions, cells, periodic, *(row.index_select(0, near) for row in rows))

    def _serve(self, positions: Tensor, cells: Tensor, system: Tensor) -> Tensor:
        """Whether no pair within the cutoff can be missing, [systems].

        As :meth:`Candidates.serve` says, with a bound below the least singular value of a strain 1 + d: 1 - |d|.
        """
        change = self._inverses @ (cells - self._cells)
        followed = self._positions + _rows_times(self._positions, change, system)
        moved = (positions - followed).square().sum(-1)
        way = moved.new_zeros(len(cells)).index_reduce_(0, system, moved, "amax").sqrt()
        least = 1 - change.square().sum((-2, -1)).sqrt()
        return least * (self.list.cutoff + self.list.skin) - 2 * way >= self.list.cutoff

    def _search(self, serving: dict[int, Candidates], positions: Tensor, cells: Tensor) -> None:
        """Search the candidates of all systems but those of ``serving``, and put all into one batch."""
        device, starts = positions.device, np.cumsum([0, *self._sizes])
        on_host, cells_there = positions.cpu().numpy(), cells.cpu().numpy()
        found = [
            serving.get(number) or self.list.searched(on_host[start:end], cells_there[number], self._pbc)
            for number, (start, end) in enumerate(itertools.pairwise(starts))
        ]
        counts = torch.tensor([len(pairs.centers) for pairs in found])
        self._system = torch.arange(len(found)).repeat_interleave(counts).to(device)
        first = torch.from_numpy(starts).to(device)[self._system]
        self._centers = torch.cat([pairs.centers for pairs in found]) + first
        self._neighbors = torch.cat([pairs.neighbors for pairs in found]) + first
        self._unit_shifts = torch.cat([pairs.unit_shifts for pairs in found])
        searched = (
            np.concatenate([pairs.positions for pairs in found]),
            np.stack([pairs.cell for pairs in found]),
            np.stack([_inverse(pairs.cell) for pairs in found]),
        )
        self._positions, self._cells, self._inverses = (torch.from_numpy(rows).to(device) for rows in searched)
        self._found = found


def _inverse(cell: np.ndarray) -> np.ndarray:
    """Of a cell without volume a matrix by which any change of it is too large."""
    return np.linalg.inv(cell) if np.linalg.matrix_rank(cell) == 3 else np.full((3, 3), 1e30)


def _rows_times(rows: Tensor, matrices: Tensor, of: Tensor) -> Tensor:
    """Each row [rows, 3] times the matrix [matrices, 3, 3] that is its own, of whose number ``of`` knows."""
    if len(matrices) == 1:
        return rows @ matrices[0]
    return (rows[:, :, None] * matrices[of]).sum(1)


@dataclass
class _Kept:
    """A model's inputs of a batch of systems, and what they were made of."""

    numbers: Tensor
    system: Tensor
    pbc: np.ndarray
    options: tuple[Any, ...]
    inputs: dict[str, Any]
    sizes: list[int]

    def is_of(self, state: Any, pbc: np.ndarray, options: tuple[Any, ...]) -> bool:
        """Whether the state has these systems; waits for the device."""
        same = state.atomic_numbers.shape == self.numbers.shape and options == self.options
        if not same or (pbc != self.pbc).any():
            return False
        equal = (state.atomic_numbers == self.numbers) & (state.system_idx == self.system)
        return bool(equal.all())


class _Asked(Exception):
    """Ends a package's own step where it calls its model."""


class _InputsOnly(torch.nn.Module):
    """In the place of a model: remembers what it is called with."""

    def forward(self, given: Any, **options: Any) -> Any:
        self.given = given
        raise _Asked


class QuickModel:
    """Mixed into a torch-sim model, before its class.

    acceleration: of its model. step: how inputs are made, in words. neighbors: of the batch.
    """

    acceleration: Acceleration
    step: str = ""
    neighbors: BatchNeighbors | None = None
    _kept: _Kept | None = None
    _package: Package

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name not in ("_kept", "neighbors")}
        return _new, (type(self).__mro__[2],), state

    def why_stock(self) -> str:
        """Why the class's own step makes the inputs; else ""."""
        wrapper: Any = self
        model = wrapper.model
        if not all(getattr(wrapper, f"_compute_{name}", True) for name in ("forces", "stress")):
            return "it does not compute forces and stress"
        if getattr(wrapper, "_use_compile", False):
            return "compile_mode pads them"
        if getattr(wrapper, "_is_polar", False) or getattr(model, "embedding_specs", None):
            return "the model reads more of a state than species and cell"
        return "it is in training mode" if model.training else missing_search(torch.device(wrapper.device))

    def forward(self, state: Any, **options: Any) -> dict[str, Tensor]:
        """energy [systems], forces [atoms, 3] and stress [systems, 3, 3] in torch-sim's units."""
        reason = self.why_stock() or ("they are no state" if isinstance(state, dict) else "")
        step = f"the class's own, because {reason}" if reason else f"inputs kept on {self.device}"  # type: ignore[attr-defined]
        if step != self.step:
            self.step = step
            LOG.log(logging.WARNING if reason else logging.INFO, "%s: steps with %s", type(self).__name__, step)
        if not reason:
            return self._quick(state)
        if hasattr(self.model, "set_is_batch_data"):  # type: ignore[attr-defined]
            self.model.set_is_batch_data(True)  # type: ignore[attr-defined]
        return super().forward(state, **options)  # type: ignore[misc]

    @torch.no_grad()
    def _quick(self, state: Any) -> dict[str, Tensor]:
        wrapper: Any = self
        if state.device != wrapper.device:
            state = state.to(wrapper.device)
        pbc = torch.as_tensor(state.pbc).expand(3).cpu().numpy()
        kept = self._inputs_of(state, pbc)
        assert self.neighbors is not None
        positions, cells = state.positions.detach().double(), state.row_vector_cell.detach().double()
        graph = self.neighbors.graph(positions, cells, pbc, kept.system, kept.sizes)
        inputs = dict(kept.inputs)
        for name, value in self._package.moving(wrapper.model, graph).items():
            inputs[name] = value.to(kept.inputs[name].dtype)
        with torch.enable_grad():
            out = self._package.evaluate(wrapper.model, inputs, training=False, stress=True)
        found = {"energy": out.energy, "forces": out.forces, "stress": out.stress}
        return {name: value.detach() for name, value in found.items() if value is not None}

    def _inputs_of(self, state: Any, pbc: np.ndarray) -> _Kept:
        """Those of the last step, or what the class itself gives its model for such systems."""
        wrapper: Any = self
        options = (getattr(wrapper, "_head_index", None), getattr(wrapper, "modal", None), id(wrapper.model))
        if self._kept is None or not self._kept.is_of(state, pbc, options):
            self._kept = None  # while they are made, which may fail
            model, wrapper.model = wrapper.model, _InputsOnly()
            try:
                super().forward(state.clone())  # type: ignore[misc]
            except _Asked:
                given = wrapper.model.given
            finally:
                wrapper.model = model
            given = dict(given) if isinstance(given, dict) else given.to_dict()
            sizes = state.system_idx.bincount().tolist()
            system = state.system_idx.clone()
            self._kept = _Kept(state.atomic_numbers.clone(), system, pbc, options, given, sizes)
            cutoff = float(self._package.cutoff(model))
            if self.neighbors is None or self.neighbors.list.cutoff != cutoff:
                self.neighbors = BatchNeighbors(cutoff, torch.device(wrapper.device))
        return self._kept


@functools.cache
def _quick_class(stock: Any) -> Any:
    """``stock`` with :class:`QuickModel` before it."""
    return type(stock.__name__, (QuickModel, stock), {"__module__": stock.__module__})


def _new(stock: Any) -> Any:
    """A copy's object, without its state."""
    made = _quick_class(stock)
    return made.__new__(made)


# Classes whose ``forward`` was read, in torch-sim 0.3.0 and 0.6.2, and in the packages.
_CLASSES = (
    "torch_sim.models.mace.MaceModel",
    "mace.calculators.mace_torchsim.MaceTorchSimModel",
    "sevenn.torchsim.SevenNetModel",
    "nequip.integrations.torchsim.NequIPTorchSimCalc",
    "torch_sim.models.nequip_framework.NequIPFrameworkModel",
)


def accelerate_torch_sim(model: Any, *, capture: bool = False, **options: Any) -> Acceleration:
    """Put Equitune into a torch-sim model, in place; the table of what was replaced.

        >>> model = MaceModel(mace, device=device, dtype=torch.float32)
        >>> accelerate_torch_sim(model, capture=True)
        >>> ts.integrate(system=systems, model=model, integrator=ts.integrators.nve, ...)

    Inputs stay on the device from step to step, and neighbours are searched within a skin (see :class:`QuickModel`);
    where they do not, one logged line says why.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems and small batches. options: of :func:`autotune.accelerate`. Warns if no convolution is
    Equitune's. Raises InputError for what holds no model, UnsupportedError for a model that cannot be captured.
    """
    inside = getattr(model, "model", None)
    if not isinstance(inside, torch.nn.Module):
        raise InputError(
            f"model is of type {type(model).__name__}; expected a torch-sim model that holds a package's model as its "
            "attribute model, such as torch_sim.models.mace.MaceModel"
        )
    if isinstance(inside, CapturedModel):
        raise InputError("the torch-sim model holds a captured model already; accelerate it once")
    package = next((one for one in PACKAGES if one.is_installed and one.owns(inside)), None)
    found = accelerate(inside, **options)
    found.warn_without_convolutions()
    if capture:
        model.model = captured(inside)
    stock: Any = type(model)
    is_known = package is not None and f"{stock.__module__}.{stock.__qualname__}" in _CLASSES
    if is_known and not isinstance(model, QuickModel):
        model.__class__ = _quick_class(stock)
        model._package = package
    if isinstance(model, QuickModel):
        model.acceleration = found
    return found
