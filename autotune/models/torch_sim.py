"""torch-sim's models with Equitune in them: many systems at a time, in one batch.

The class of a package's models may be torch-sim's (``torch_sim.models.mace.MaceModel``) or, with later versions, the
package's own (``sevenn.torchsim.SevenNetModel``, ``nequip.integrations.torchsim.NequIPTorchSimCalc``): all of them hold
the package's model as ``model``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel
from autotune.models.capture import capture as captured
from autotune.models.neighbors import SKIN, VesinSearch, missing_search
from autotune.models.stand_ins import Acceleration
from kernelgen.errors import InputError


@dataclass
class _Kept:
    """Pairs of one system that are at most cutoff and skin apart, found at ``positions`` in ``cell``."""

    positions: Tensor
    cell: Tensor
    pbc: Any
    mapping: Tensor
    shifts: Tensor

    def serve(self, positions: Tensor, cell: Tensor, pbc: Any) -> bool:
        """Whether no pair within the cutoff can be missing; waits for the device."""
        if positions.shape != self.positions.shape or pbc != self.pbc:
            return False
        moved = (positions.double() - self.positions).square().sum(-1).amax()
        return bool((moved <= (SKIN / 2) ** 2) & (cell == self.cell).all())


class KeptNeighbors:
    """In the place of a torch-sim model's ``neighbor_list_fn``: searches within a skin, and again only when needed.

    torch-sim 0.3 searches on the host, in each step, for one system of the batch after the other; this on the device of
    the positions. model: of torch-sim, which knows how many systems a batch has. search: its own function. searches: so
    far.
    """

    def __init__(self, model: Any, search: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.model, self.search = model, search
        self.searches = 0
        self._calls = 0
        self._kept: dict[int, _Kept] = {}
        self._vesin: VesinSearch | None = None

    def __call__(
        self, positions: Tensor, cell: Tensor, pbc: Any, cutoff: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """As torch-sim's: pairs [2, pairs], and whole numbers of cells between their atoms [pairs, 3]."""
        systems = self.model.n_systems
        if len(self._kept) > systems:
            self._kept.clear()
        number = self._calls % systems
        self._calls = number + 1
        kept = self._kept.get(number)
        if kept is None or not kept.serve(positions, cell, pbc):
            if not torch.isfinite(positions).all():
                raise InputError("a coordinate is not finite; the simulation has gone astray before this step")
            mapping, shifts = self._searched(positions, cell, pbc, cutoff + SKIN, options)
            kept = self._kept[number] = _Kept(positions.double(), cell.clone(), pbc, mapping, shifts)
            self.searches += 1
        at = positions.double()
        vectors = at[kept.mapping[1]] - at[kept.mapping[0]] + kept.shifts.double() @ cell.double()
        near = (vectors.square().sum(-1) < cutoff.double() ** 2).nonzero().squeeze(-1)
        return kept.mapping[:, near], kept.shifts[near]

    def _searched(
        self, positions: Tensor, cell: Tensor, pbc: Any, reach: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not positions.is_cuda or missing_search(positions.device):
            return self.search(positions=positions, cell=cell, pbc=pbc, cutoff=reach, **options)
        if self._vesin is None or self._vesin.cutoff != float(reach):
            self._vesin = VesinSearch(float(reach))
        periodic = torch.as_tensor(pbc).expand(3).cpu()
        centers, neighbors, shifts = self._vesin.pairs(positions.double(), cell.double(), periodic)
        return torch.stack((centers, neighbors)), shifts.to(positions.dtype)


def accelerate_torch_sim(model: Any, *, capture: bool = False, **options: Any) -> Acceleration:
    """Put Equitune into a torch-sim model, in place; the table of what was replaced.

        >>> model = MaceModel(mace, device=device, dtype=torch.float32)
        >>> accelerate_torch_sim(model, capture=True)
        >>> ts.integrate(system=systems, model=model, integrator=ts.integrators.nve, ...)

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems and small batches. options: of :func:`autotune.accelerate`. The neighbour function of
    torch-sim's own model of MACE becomes :class:`KeptNeighbors`. Warns if no convolution is Equitune's. Raises
    InputError for what holds no model, UnsupportedError for a model that cannot be captured.
    """
    inside = getattr(model, "model", None)
    if not isinstance(inside, torch.nn.Module):
        raise InputError(
            f"model is of type {type(model).__name__}; expected a torch-sim model that holds a package's model as its "
            "attribute model, such as torch_sim.models.mace.MaceModel"
        )
    if isinstance(inside, CapturedModel):
        raise InputError("the torch-sim model holds a captured model already; accelerate it once")
    found = accelerate(inside, **options)
    found.warn_without_convolutions()
    if capture:
        model.model = captured(inside)
    if type(model).__module__ == "torch_sim.models.mace":
        model.neighbor_list_fn = KeptNeighbors(model, model.neighbor_list_fn)
    return found
