"""A simulation's step through a package's ASE calculator: what does not change between steps stays on the device.

A step of MACE, NequIP or SevenNet by their own calculators makes everything anew on the host: neighbours, species,
one-hot rows, a batch. With their models accelerated that is most of the step. :class:`KeptInputs` makes it once for a
set of atoms; a step then sends positions and cell, and takes the edges from a :class:`NeighborList`.

On a GPU a simulation's models are captured after some steps: then each step is one launch, but for a search of
neighbours when the skin is used up (:class:`OneLaunch`).

Each package's ``use`` module has the calculator that does so, and :func:`quicken` turns a stock one into it, in place.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from autotune.models.capture import CapturedModel, along_x, capture, device_of, kind_of_step, settings_of
from autotune.models.neighbors import AtomicGraph, Candidates, NeighborList, missing_search
from autotune.models.padding import (
    Compute,
    Counts,
    Fields,
    GraphMemory,
    PaddedStep,
    best_fit,
    ghost_ends_there,
    padded_size,
    step_above,
)
from kernelgen.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from ase import Atoms

    from autotune.models.stand_ins import Acceleration


# Steps of moving atoms, each one launch: neighbours, model and results.
#
# A calculator has positions on the host and wants results there. A captured step of ``autotune.models.capture`` takes a
# graph on the device; finding the graph, copying it and fetching the results took longer than the model on small
# systems. Here one CUDA graph does all of it:
#
# 1. Positions and cell are copied from the host, in one piece.
# 2. Of the candidates (``autotune.models.neighbors``) those within the cutoff become the edges, and ghosts fill the
#    rest.
# 3. The model computes.
# 4. The results and the number of edges are copied to the host, in one piece.
#
# Once the candidates serve, the launch is made. What else must hold for its results is looked at while the device
# works: that the atoms are the same, that the model is the one that was captured; and after it, that the edges had
# room. If one does not, the results are thrown away, what is wrong is mended, and the step is launched again.


class Frame(NamedTuple):
    """Atoms on the host: positions [atoms, 3] and cell [3, 3] in angstrom, float64; periodic along ``pbc`` [3]."""

    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray


class OneLaunch:
    """The steps of one calculator by one captured model, which owns what is captured.

    names: the results that are wanted. cutoff: in angstrom. options: of the model's call.
    """

    def __init__(self, model: CapturedModel, cutoff: float, names: Sequence[str], options: Mapping[str, Any]) -> None:
        self.model, self.cutoff, self.names, self.options = model, cutoff, tuple(names), dict(options)
        self._kind: Hashable = None
        self._step: LaunchedStep | None = None
        self._real = Counts(0, 0, 1)
        self._inputs: Any = None
        self._has_begun = False

    @property
    def edges(self) -> int:
        """Of the last step."""
        return self._real.edges

    def refuses(self, inputs: Any) -> bool:
        """Whether the captured model would leave a call with these inputs to the model itself."""
        model = self.model
        return model.outgrown != "capture" or bool(model.package.runs_eagerly(model.model, inputs, self.options))

    def begin(self, frame: Frame, pairs: Candidates) -> None:
        """Launch the step, if it is captured for these candidates."""
        step = self._step
        self._has_begun = False
        if step is not None and step.pairs is pairs and self.model.has(self._kind, step):
            step.begin(frame)
            self._has_begun = True

    def end(self, frame: Frame, inputs: Any, pairs: Candidates) -> dict[str, Tensor]:
        """The results on the host, launched again until everything holds. inputs: the model's, of these atoms."""
        while True:
            if not self._holds(inputs, pairs):
                self._has_begun = False
                self._prepare(frame, inputs, pairs)
            step = self._step
            assert step is not None
            if not self._has_begun:
                step.begin(frame)
            self._has_begun = False
            edges, results = step.end(self._real)
            self._real = self._real._replace(edges=edges)
            if not self.model.has(self._kind, step):
                step.check_asked(inputs)
                self.model.keep(self._kind, step)
            if best_fit(self._real, [step.size], self.model.growth) is None:
                self._step = None  # another size serves, now or in the next step
            if edges <= step.size.edges:
                self.model.replays += 1
                return results

    def _holds(self, inputs: Any, pairs: Candidates) -> bool:
        step = self._step
        if step is None or inputs is not self._inputs or pairs is not step.pairs:
            return False
        return step.settings == settings_of(step.device) and self.model.is_still()

    def _prepare(self, frame: Frame, inputs: Any, pairs: Candidates) -> None:
        """Take the step of the right size, and fill it with what does not change while atoms move."""
        model = self.model
        model.follow_the_model()
        fields, real = model.package.fields(model.model, inputs, self.cutoff)
        self._real = real._replace(edges=pairs.edges(frame.positions, frame.cell, self.cutoff))
        fields = {
            name: field._replace(tensor=field.tensor.narrow(field.axis, 0, 0)) if field.per == "edges" else field
            for name, field in fields.items()
        }
        device = device_of(model.model, fields)
        self._kind = (self.names, kind_of_step(fields, self.options, device))
        step = model.serving(self._kind, self._real)
        if not isinstance(step, LaunchedStep) or step.room < len(pairs.centers):
            model.make_room()
            step = LaunchedStep(
                padded_size(self._real, model.growth),
                fields,
                device,
                model.computing(self.options),
                {name: per for name, per in model.package.results.items() if name in self.names},
                model.memory,
                room=step_above(len(pairs.centers), model.growth),
                cutoff=self.cutoff,
                moving=lambda graph: model.package.moving(model.model, graph),
            )
        step.place(fields, self._real._replace(edges=0), pairs)
        self._step, self._inputs = step, inputs


class LaunchedStep(PaddedStep):
    """A captured step from positions on the host to results on the host.

    results: those that are wanted. room: for so many candidates. moving: the model's tensors of a graph, whose edges
    are padded. settings: torch's, when it was made. pairs: the candidates that it holds.
    """

    def __init__(
        self,
        size: Counts,
        fields: Fields,
        device: torch.device,
        compute: Compute,
        results: Mapping[str, str],
        memory: GraphMemory,
        *,
        room: int,
        cutoff: float,
        moving: Callable[[AtomicGraph], dict[str, Tensor]],
    ) -> None:
        super().__init__(size, fields, device, compute, results, memory)
        self.room, self.cutoff, self.moving = room, cutoff, moving
        self.settings = settings_of(device)
        self.pairs: Candidates | None = None
        self._axes = {name: field.axis for name, field in fields.items()}
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        with torch.inference_mode(False):
            # Positions, cell, periodicity, and the numbers of atoms and of candidates.
            self._sent = _on_host(3 * size.atoms + 9 + 3 + 2, device)
            self._arrived = torch.empty_like(self._sent, device=device)
            self._returned = _on_host(0, device)
            self._centers, self._neighbors = torch.zeros(2, room, dtype=torch.long, device=device)
            self._unit_shifts = torch.zeros(room, 3, dtype=torch.float64, device=device)
            self._numbers = torch.arange(max(room, size.edges), device=device)
            self._ghost_shift = along_x(1.0).to(self._arrived)
            self._ghost_offset = along_x(2 * cutoff).to(self._arrived)

    @torch.no_grad()
    def place(self, fields: Fields, real: Counts, pairs: Candidates) -> None:
        """Fill in what does not change while atoms move, and the candidates."""
        self.pairs = None
        self.fill(fields, real)
        count = len(pairs.centers)
        self._centers[:count], self._neighbors[:count] = pairs.centers, pairs.neighbors
        self._unit_shifts[:count] = pairs.unit_shifts
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the host's memory may still be read
        self._sent.zero_()
        self._sent[-2], self._sent[-1] = real.atoms, count
        self.pairs = pairs

    def begin(self, frame: Frame) -> None:
        """Launch the step; does not wait."""
        sent = self._sent.numpy()
        sent[: frame.positions.size] = frame.positions.ravel()
        sent[-14:-5], sent[-5:-2] = frame.cell.ravel(), frame.pbc
        self.launch()

    def end(self, real: Counts) -> tuple[int, dict[str, Tensor]]:
        """The number of edges and the real rows of the results, on the host; meaningless if there were too many."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        edges, *values = self._returned.clone().split([1, *(shape.numel() for _, shape in self._shapes.values())])
        results = {}
        for (name, (dtype, shape)), flat in zip(self._shapes.items(), values, strict=True):
            rows = getattr(real, self.results[name])
            results[name] = flat.reshape(shape)[:rows].to(dtype)
        return int(edges), results

    def _computed(self) -> dict[str, Any]:
        with torch.no_grad():
            self._arrived.copy_(self._sent, non_blocking=True)
            graph, edges = self._padded_graph()
            for name, value in self.moving(graph).items():
                axis = self._axes[name]
                self.buffers[name].narrow(axis, 0, value.shape[axis]).copy_(value)
        found = super()._computed()
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        flat = torch.cat([edges.double().reshape(1), *(value.double().reshape(-1) for value in tensors.values())])
        if len(self._returned) != len(flat):  # in the first call, which is no capture
            self._shapes = {name: (value.dtype, value.shape) for name, value in tensors.items()}
            self._returned = _on_host(len(flat), self.device)
        self._returned.copy_(flat, non_blocking=True)
        return found

    def _padded_graph(self) -> tuple[AtomicGraph, Tensor]:
        """The graph within the cutoff, its edges in the order of the candidates and followed by ghosts; and how many.

        If there are more than the size has room for, the last ones are missing.
        """
        size = self.size
        positions = self._arrived[:-14].view(size.atoms, 3)
        cell, pbc = self._arrived[-14:-5].view(3, 3), self._arrived[-5:-2] > 0
        atoms, pairs = self._arrived[-2:].long()
        offsets = self._unit_shifts @ cell
        vectors = positions[self._neighbors] - positions[self._centers] + offsets
        near = (vectors.square().sum(-1) < self.cutoff**2) & (self._numbers[: self.room] < pairs)
        counts = near.cumsum(0)
        edges, numbers = counts[-1], self._numbers[: size.edges]
        # The edge of number k is the first candidate with k + 1 near ones up to it.
        chosen = torch.searchsorted(counts, numbers + 1).clamp(max=self.room - 1)
        is_real = numbers < edges
        ends = ghost_ends_there(atoms, edges, size, numbers)

        def padded(rows: Tensor, ghost: Tensor) -> Tensor:
            condition = is_real if rows.ndim == 1 else is_real[:, None]
            return torch.where(condition, rows[chosen], ghost)

        graph = AtomicGraph(
            positions=positions,
            cell=cell,
            pbc=pbc,
            centers=padded(self._centers, ends),
            neighbors=padded(self._neighbors, ends),
            unit_shifts=padded(self._unit_shifts, self._ghost_shift),
            offsets=padded(offsets, self._ghost_offset),
            vectors=padded(vectors, self._ghost_offset),
        )
        return graph, edges


def _on_host(length: int, device: torch.device) -> Tensor:
    """Zeros, float64, in memory that the device can read."""
    return torch.zeros(length, dtype=torch.float64, pin_memory=device.type == "cuda")


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
        self._launches: list[OneLaunch] = []
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
            return [launch.end(frame, inputs, pairs) for launch in self._launches]
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
        self._launches = [OneLaunch(model, self.list.cutoff, names, options) for model in captured]
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
