"""A simulation's step through a package's ASE calculator: what does not change between steps stays on the device.

A step of MACE, NequIP or SevenNet by their own calculators makes everything anew on the host: neighbours, species,
one-hot rows, a batch. With their models accelerated that is most of the step. :class:`KeptInputs` makes it once for a
set of atoms; a step then sends positions and cell, and takes the edges from a :class:`NeighborList`.

Each package's ``use`` module has the calculator that does so, and :func:`quicken` turns a stock one into it, in place.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from autotune.models.neighbors import AtomicGraph, NeighborList, missing_search

if TYPE_CHECKING:
    from ase import Atoms

LOG = logging.getLogger("equitune")

Inputs = TypeVar("Inputs")


class KeptInputs(Generic[Inputs]):
    """A package's inputs of a set of atoms, and the neighbours of these atoms as they move.

    cutoff: in angstrom. searches, makes: how often neighbours were searched and inputs made so far.
    """

    def __init__(self, cutoff: float, device: torch.device) -> None:
        self.list = NeighborList(cutoff, device)
        self.makes = 0
        self._inputs: Inputs | None = None
        self._depends_on: tuple[Any, ...] = ()

    @property
    def searches(self) -> int:
        return self.list.searches

    def of(self, atoms: Atoms, depends_on: Sequence[Any], make: Callable[[], Inputs]) -> tuple[Inputs, AtomicGraph]:
        """The inputs, made anew if the atoms' species, their periodicity or ``depends_on`` changed; and the graph.

        The inputs are shared between steps: copy before you change them.
        """
        positions, cell = atoms.get_positions(), np.array(atoms.cell)
        graph = self.list.graph(positions, cell, atoms.pbc)
        identity = (atoms.numbers, atoms.pbc, *depends_on)
        if self._inputs is None or not _equal(identity, self._depends_on):
            self._inputs = None  # while they are made, which may fail
            inputs = make()
            self._depends_on = copy.deepcopy(identity)
            self._inputs = inputs
            self.makes += 1
        return self._inputs, graph

    def __deepcopy__(self, memo: Any) -> KeptInputs[Inputs]:
        return KeptInputs(self.list.cutoff, self.list.device)

    def __reduce__(self) -> tuple:
        return KeptInputs, (self.list.cutoff, self.list.device)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind in "fc")
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def to_host(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors on the CPU, by one copy from their device."""
    if all(tensor.is_cpu for tensor in tensors):
        yield from tensors
        return
    rows = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu()
    for tensor, values in zip(tensors, rows.split([tensor.numel() for tensor in tensors]), strict=True):
        yield values.reshape(tensor.shape).to(tensor.dtype)


class QuickSteps:
    """Mixed into a package's calculator, after its class: so an instance of that class can become one of the mixture.

    step: how inputs are made, in words.
    """

    _kept: KeptInputs | None = None
    step: str = ""

    def why_stock(self) -> str:
        """Why the package's own code makes the inputs: the calculator has an option that is not known here; else ""."""
        raise NotImplementedError

    def model_cutoff(self) -> float:
        raise NotImplementedError

    def steps_quickly(self) -> bool:
        """Whether inputs are kept; says once, by the logger ``equitune``, what runs."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        reason = self.why_stock() or missing_search(device)
        found = "" if device.type == "cpu" else " by vesin"
        step = f"the package's own, because {reason}" if reason else f"inputs kept on {device}, neighbors{found} there"
        if step != self.step:
            self.step = step
            LOG.log(logging.WARNING if reason else logging.INFO, "%s: steps with %s", type(self).__name__, step)
        return not reason

    def kept_inputs(self) -> KeptInputs:
        cutoff, device = self.model_cutoff(), self.device  # type: ignore[attr-defined]
        if self._kept is None or (self._kept.list.cutoff, self._kept.list.device) != (cutoff, device):
            self._kept = KeptInputs(cutoff, device)
        return self._kept


# By full name of a package's calculator: the module that has its quick one, under the same name.
CALCULATORS = {
    "mace.calculators.mace.MACECalculator": "autotune.models.mace.use",
    "sevenn.calculator.SevenNetCalculator": "autotune.models.sevennet.use",
    "nequip.integrations.ase.NequIPCalculator": "autotune.models.nequip.use",
}


def quicken(calculator: Any) -> str:
    """Make the steps of a package's calculator quick, in place; how they are made, or "" for another object."""
    kind = type(calculator)
    home = CALCULATORS.get(f"{kind.__module__}.{kind.__qualname__}")
    if home is not None:
        calculator.__class__ = getattr(importlib.import_module(home), kind.__name__)
        calculator._stock_class = kind
    if not isinstance(calculator, QuickSteps):
        return ""
    calculator.steps_quickly()
    return calculator.step


def unquicken(calculator: Any) -> None:
    """Give a calculator its package's class back, if :func:`quicken` changed it."""
    kind = vars(calculator).pop("_stock_class", None)
    if kind is not None:
        calculator.__class__ = kind
        calculator.__dict__.pop("_kept", None)
        calculator.__dict__.pop("step", None)
