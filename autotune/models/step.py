"""A simulation's step through a package's ASE calculator: what does not change between steps stays on the device.

A step of MACE, NequIP or SevenNet by their own calculators makes everything anew on the host: neighbours, species,
one-hot rows, a batch. With their models accelerated that is most of the step. :class:`KeptInputs` makes it once for a
set of atoms; a step then sends positions and cell, and takes the edges from a :class:`NeighborList`.

On a GPU a simulation's models are captured after some steps: then each step is one launch, but for a search of
neighbours when the skin is used up (``autotune.models.launch``).

Each package's ``use`` module has the calculator that does so, and :func:`quicken` turns a stock one into it, in place.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from autotune.models.capture import CapturedModel, capture
from autotune.models.launch import FromHost, OneLaunch
from autotune.models.neighbors import AtomicGraph, Frame, NeighborList, missing_search
from kernelgen.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ase import Atoms

    from autotune.models.stand_ins import Acceleration

LOG = logging.getLogger("equitune")

# A capture takes as long as fifty steps or so that are not captured; atoms that stay for ten are simulated.
PATIENCE = 10

Inputs = TypeVar("Inputs")


class KeptInputs(Generic[Inputs]):
    """A package's inputs of a set of atoms, and the neighbours of these atoms as they move.

    cutoff: in angstrom. patience: models that are not captured are after so many steps of the same atoms; None: never.
    searches, makes: how often neighbours were searched and inputs made so far. derived: what a calculator computed of
    the inputs, forgotten with them. refusal: why models cannot be captured.
    """

    def __init__(self, cutoff: float, device: torch.device, patience: int | None = None) -> None:
        self.list, self.patience = NeighborList(cutoff, device), patience
        self.makes = 0
        self.derived: dict[str, Any] = {}
        self.refusal = ""
        self._inputs: Inputs | None = None
        self._depends_on: tuple[Any, ...] = ()
        self._steps = 0
        self._launches: list[OneLaunch[Frame]] = []
        self._launched_models: list[Any] = []

    @property
    def searches(self) -> int:
        return self.list.searches

    @property
    def launched_edges(self) -> int:
        """Of the last step by one launch."""
        return self._launches[0].edges

    @property
    def inputs(self) -> Inputs:
        """Those of the last step."""
        assert self._inputs is not None
        return self._inputs

    def of(self, atoms: Atoms, depends_on: Sequence[Any], make: Callable[[], Inputs]) -> tuple[Inputs, AtomicGraph]:
        """The inputs, made anew if the atoms' species, their periodicity or ``depends_on`` changed; and the graph.

        The inputs are shared between steps: copy before you change them.
        """
        graph = self.list.graph(*_frame(atoms))
        return self._inputs_of(atoms, depends_on, make), graph

    def launched(
        self,
        models: Sequence[Any],
        atoms: Atoms,
        depends_on: Sequence[Any],
        make: Callable[[], Inputs],
        *,
        names: Sequence[str],
        **options: Any,
    ) -> list[dict[str, Tensor]] | None:
        """Each model's results on the host by one launch; None unless all are captured, and take such inputs.

        names: the results that are wanted. options: of a call of the models.
        """
        if not self._has_launches(list(models), names, options):
            return None
        frame = _frame(atoms)
        pairs = self.list.candidates(*frame)
        for launch in self._launches:
            launch.begin(frame, pairs)
        inputs = self._inputs_of(atoms, depends_on, make)
        if any(launch.refuses(inputs) for launch in self._launches):
            return None
        try:
            # Never None: that these candidates serve is known before the launch.
            return cast(list[dict[str, Tensor]], [launch.end(frame, inputs, pairs) for launch in self._launches])
        except (UnsupportedError, torch.cuda.OutOfMemoryError) as error:
            if all(isinstance(model, CapturedModel) for model in models):
                raise
            self._refuse(error)
            return None

    def _has_launches(self, models: list[Any], names: Sequence[str], options: Mapping[str, Any]) -> bool:
        if models == self._launched_models:
            return bool(self._launches)
        patient = self.patience is None or self._steps < self.patience
        if patient and not all(isinstance(model, CapturedModel) for model in models):
            return False
        self._launched_models, self.refusal = models, ""
        try:
            captured = [model if isinstance(model, CapturedModel) else capture(model) for model in models]
        except (UnsupportedError, InputError) as error:
            self._refuse(error)
            return False
        self._launches = [OneLaunch(FromHost, model, self.list.cutoff, names, options) for model in captured]
        return True

    def _refuse(self, error: Exception) -> None:
        self._launches = []
        out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
        self.refusal = "the device has no memory for it" if out_of_memory else str(error)

    @property
    def launches(self) -> bool:
        """Whether steps are one launch each."""
        return bool(self._launches)

    def _inputs_of(self, atoms: Atoms, depends_on: Sequence[Any], make: Callable[[], Inputs]) -> Inputs:
        identity = (atoms.numbers, atoms.pbc, *depends_on)
        if self._inputs is None or not _equal(identity, self._depends_on):
            self._inputs = None  # while they are made, which may fail
            self.derived.clear()
            inputs = make()
            self._depends_on = copy.deepcopy(identity)
            self._inputs = inputs
            self.makes += 1
            self._steps = 0
        self._steps += 1
        return self._inputs

    def __deepcopy__(self, memo: Any) -> KeptInputs[Inputs]:
        return KeptInputs(self.list.cutoff, self.list.device, self.patience)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptInputs, (self.list.cutoff, self.list.device, self.patience)


def in_dtype(moving: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What moves with the atoms (``Package.moving``), in the dtype of a model."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in moving.items()}


def _frame(atoms: Atoms) -> Frame:
    return Frame(atoms.get_positions(), np.array(atoms.cell), atoms.pbc)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind in "fc")
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, by one copy from their device."""
    there = [tensor.detach() for tensor in tensors if not tensor.is_cpu]
    if not there:
        return list(tensors)
    values = torch.cat([tensor.double().flatten() for tensor in there]).cpu()
    arrived = iter(values.split([tensor.numel() for tensor in there]))
    return [t if t.is_cpu else next(arrived).reshape(t.shape).to(t.dtype) for t in tensors]


def changes_since(calculator: Any, atoms: Atoms, tol: float = 1e-15) -> list[str]:
    """ASE's ``check_state`` of a calculator: what changed since its last calculation, compared exactly.

    ASE asks three times a step, and by its own comparison that takes as long as a small model.
    """
    from ase.calculators.calculator import all_changes

    last = calculator.atoms
    if last is None or last.arrays.keys() != atoms.arrays.keys():
        return list(all_changes)
    of_cell = {"cell": (last.cell.array, atoms.cell.array), "pbc": (last.pbc, atoms.pbc)}
    pairs = {name: (last.arrays[name], atoms.arrays[name]) for name in last.arrays} | of_cell
    compared = [name for name in all_changes if name in pairs and name not in calculator.ignored_changes]
    return [name for name in compared if not np.array_equal(*pairs[name])]


def tell_step(runner: Any, step: str, *, is_stock: bool) -> None:
    """Keep how inputs are made as the runner's ``step``, and log it when it changes; as a warning if by its package."""
    if step != runner.step:
        runner.step = step
        LOG.log(logging.WARNING if is_stock else logging.INFO, "%s: steps with %s", type(runner).__name__, step)


class QuickSteps:
    """Mixed into a package's calculator, after its class: so an instance of that class can become one of the mixture.

    step: how inputs are made, in words.
    """

    _kept: KeptInputs[Any] | None = None
    step: str = ""
    # On a GPU models are captured by themselves.
    captures: bool = True
    # Whether they were at once.
    _captured: bool = False
    acceleration: Acceleration

    def be_quick(self, acceleration: Acceleration, capture: bool | None) -> None:
        """The last step of a calculator's construction. acceleration: of its models. capture: as it was given."""
        self.acceleration = acceleration
        self.captures = capture is not False
        if capture:
            self.capture_at_once()

    def why_stock(self) -> str:
        """Why the package's own code makes the inputs: the calculator has an option that is not known here; else ""."""
        raise NotImplementedError

    def model_cutoff(self) -> float:
        raise NotImplementedError

    def steps_quickly(self) -> bool:
        """Whether inputs are kept; says by the logger ``equitune`` what runs, when it changes."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        reason = self.why_stock() or missing_search(device)
        step = f"the package's own, because {reason}" if reason else self._step_on(device)
        tell_step(self, step, is_stock=bool(reason))
        return not reason

    def _step_on(self, device: torch.device) -> str:
        step = f"inputs kept on {device}, neighbors{'' if device.type == 'cpu' else ' by vesin'} there"
        if self._kept is not None and self._kept.refusal:
            return f"{step}, not one launch each, because {self._kept.refusal}"
        if self._captured and device.type == "cpu":
            return f"{step}, padded, not one launch each, because a CPU has no graphs"
        return f"{step}, one launch each" if self._kept is not None and self._kept.launches else step

    def capture_at_once(self) -> None:
        """Capture the models at their first step; the table says what that is here."""
        _change_models(self, capture)
        self._captured = True
        self.steps_quickly()
        self.acceleration = dataclasses.replace(self.acceleration, step=self.step)

    def kept_inputs(self) -> KeptInputs[Any]:
        cutoff, device = self.model_cutoff(), self.device  # type: ignore[attr-defined]
        if self._kept is None or (self._kept.list.cutoff, self._kept.list.device) != (cutoff, device):
            self._kept = KeptInputs(cutoff, device, PATIENCE if self.captures and device.type == "cuda" else None)
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
    if not isinstance(calculator, QuickSteps):
        return ""
    calculator.steps_quickly()
    return calculator.step


def unquicken(calculator: Any) -> None:
    """Make one of Equitune's calculators its package's, with the models themselves; a subclass keeps its class."""
    kind = type(calculator)
    if kind.__bases__[1:] != (QuickSteps,):
        return
    calculator.__class__ = kind.__bases__[0]
    for name in ("_kept", "step", "acceleration", "captures", "_captured"):
        vars(calculator).pop(name, None)
    _change_models(calculator, lambda model: model.model if isinstance(model, CapturedModel) else model)


def _change_models(calculator: Any, change: Callable[[Any], Any]) -> None:
    if hasattr(calculator, "models"):
        calculator.models = [change(model) for model in calculator.models]
    else:
        calculator.model = change(calculator.model)
