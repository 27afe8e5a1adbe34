"""Steps of moving atoms, each one launch: neighbours, model and results.

A captured step of ``autotune.models.capture`` takes a graph on the device. Finding the graph, copying it and fetching
the results took longer than the model on small systems. Here one CUDA graph does all of it:

1. Positions and cells arrive: from the host in one piece (:class:`FromHost`, of a calculator), or from the device
   (:class:`FromDevice`, of torch-sim).
2. Of the candidates (``autotune.models.neighbors``) those within the cutoff become the edges, and ghosts fill the
   rest.
3. The model computes.
4. The number of edges is copied to the host, and for a calculator the results with it, in one piece.

What must hold for the results is looked at while the device works: that the atoms are the same, that the model is the
one that was captured; and after it, that the edges had room. A calculator knows before a launch that the candidates
serve; torch-sim's positions are known to the device alone, which answers with the number of edges. If something does
not hold, the results are thrown away, what is wrong is mended, and the step is launched again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from autotune.models.capture import CapturedModel, along_x, device_of, kind_of_step, settings_of
from autotune.models.neighbors import AtomicGraph, Batch, BatchCandidates, Frame
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

# Where atoms are: a Frame or a Batch.
Atoms = TypeVar("Atoms")
AtomsOf = TypeVar("AtomsOf", contravariant=True)


class Pairs(Protocol[AtomsOf]):
    """Candidates of such atoms."""

    @property
    def centers(self) -> Tensor: ...

    def edges(self, atoms: AtomsOf, cutoff: float) -> int: ...


class Ended(NamedTuple):
    """What a launch found: edges within the cutoff, whether the candidates serve, and rows of real atoms and graphs."""

    edges: int
    serve: bool
    results: dict[str, Tensor]


class OneLaunch(Generic[Atoms]):
    """The steps of one simulation by one captured model, which owns what is captured.

    kind: of the steps. names: the results that are wanted. cutoff: in angstrom. options: of the model's call.
    """

    def __init__(
        self,
        kind: type[LaunchedStep[Atoms]],
        model: CapturedModel,
        cutoff: float,
        names: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        self.kind, self.model, self.cutoff, self.names, self.options = kind, model, cutoff, tuple(names), dict(options)
        self._key: Hashable = None
        self._step: LaunchedStep[Atoms] | None = None
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

    def begin(self, atoms: Atoms, pairs: Pairs[Atoms]) -> None:
        """Launch the step, if it is captured for these candidates."""
        step = self._step
        self._has_begun = False
        if step is not None and step.pairs is pairs and self.model.has(self._key, step):
            step.begin(atoms)
            self._has_begun = True

    def end(self, atoms: Atoms, inputs: Any, pairs: Pairs[Atoms]) -> dict[str, Tensor] | None:
        """The results, launched again until everything holds; None if the candidates do not serve.

        inputs: the model's, of these atoms.
        """
        while True:
            if not self._holds(inputs, pairs):
                self._has_begun = False
                self._prepare(atoms, inputs, pairs)
            step = self._step
            assert step is not None
            if not self._has_begun:
                step.begin(atoms)
            self._has_begun = False
            edges, serve, results = step.end(self._real)
            self._real = self._real._replace(edges=edges)
            if not self.model.has(self._key, step):
                step.check_asked(inputs)
                self.model.keep(self._key, step)
            if best_fit(self._real, [step.size], self.model.growth) is None:
                self._step = None  # another size serves, now or in the next step
            if not serve:
                return None
            if edges <= step.size.edges:
                self.model.replays += 1
                return results

    def _holds(self, inputs: Any, pairs: Pairs[Atoms]) -> bool:
        step = self._step
        if step is None or inputs is not self._inputs or pairs is not step.pairs:
            return False
        return step.settings == settings_of(step.device) and self.model.is_still()

    def _prepare(self, atoms: Atoms, inputs: Any, pairs: Pairs[Atoms]) -> None:
        """Take the step of the right size, and fill it with what does not change while atoms move."""
        model = self.model
        model.follow_the_model()
        fields, real = model.package.fields(model.model, inputs, self.cutoff)
        self._real = real._replace(edges=pairs.edges(atoms, self.cutoff))
        fields = {
            name: field._replace(tensor=field.tensor.narrow(field.axis, 0, 0)) if field.per == "edges" else field
            for name, field in fields.items()
        }
        device = device_of(model.model, fields)
        self._key = (self.kind, self.names, kind_of_step(fields, self.options, device))
        step = model.serving(self._key, self._real)
        if not isinstance(step, self.kind) or step.room < len(pairs.centers):
            model.make_room()
            step = self.kind(
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


class LaunchedStep(PaddedStep, Generic[Atoms]):
    """A captured step from positions and cells to results.

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
        self.pairs: Pairs[Atoms] | None = None
        self._axes = {name: field.axis for name, field in fields.items()}
        systems = size.graphs - 1
        with torch.inference_mode(False):
            # Positions, cells, periodicity, and the numbers of atoms and of candidates.
            self._lengths = (3 * size.atoms, 9 * systems, 3, 2)
            self._arrived = torch.zeros(sum(self._lengths), dtype=torch.float64, device=device)
            positions, cells, self._pbc, self._counts = self._arrived.split(self._lengths)
            self._positions, self._cells = positions.view(-1, 3), cells.view(-1, 3, 3)
            self._there = BatchCandidates.empty(size.atoms, systems, room, device)
            self._numbers = torch.arange(max(room, size.edges), device=device)
            self._ghost_shift = along_x(1.0).to(self._arrived)
            self._ghost_offset = along_x(2 * cutoff).to(self._arrived)

    @torch.no_grad()
    def place(self, fields: Fields, real: Counts, pairs: Pairs[Atoms]) -> None:
        """Fill in what does not change while atoms move, and the candidates."""
        self.pairs = None
        self.fill(fields, real)
        self._there.put(pairs)
        self._put_counts(real.atoms, len(pairs.centers))
        self.pairs = pairs

    def begin(self, atoms: Atoms) -> None:
        """Launch the step; does not wait."""
        raise NotImplementedError

    def end(self, real: Counts) -> Ended:
        """What it found, after a wait; results are meaningless if there were too many edges."""
        raise NotImplementedError

    def _put_counts(self, atoms: int, pairs: int) -> None:
        """And zeros before them: ghosts' positions."""
        raise NotImplementedError

    def _receive(self) -> None:
        """A part of the launch, before all others."""

    def _send(self, edges: Tensor, found: dict[str, Any]) -> None:
        """A part of the launch, after all others."""
        raise NotImplementedError

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _computed(self) -> dict[str, Any]:
        with torch.no_grad():
            self._receive()
            graph, edges = self._padded_graph()
            for name, value in self.moving(graph).items():
                axis = self._axes[name]
                self.buffers[name].narrow(axis, 0, value.shape[axis]).copy_(value)
        found = super()._computed()
        self._send(edges, found)
        return found

    def _padded_graph(self) -> tuple[AtomicGraph, Tensor]:
        """The graph within the cutoff, its edges in the order of the candidates and followed by ghosts; and how many.

        If there are more than the size has room for, the last ones are missing.
        """
        size, there, positions, cells = self.size, self._there, self._positions, self._cells
        atoms, pairs = self._counts.long()
        offsets, vectors = there.vectors(positions, cells)
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
            cell=self._cell_of_graph(cells),
            pbc=self._pbc > 0,
            centers=padded(there.centers, ends),
            neighbors=padded(there.neighbors, ends),
            unit_shifts=padded(there.unit_shifts, self._ghost_shift),
            offsets=padded(offsets, self._ghost_offset),
            vectors=padded(vectors, self._ghost_offset),
        )
        return graph, edges

    def _cell_of_graph(self, cells: Tensor) -> Tensor:
        return cells


class FromHost(LaunchedStep[Frame]):
    """Of one system whose positions are on the host, where its results are wanted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        with torch.inference_mode(False):
            self._sent = _on_host(len(self._arrived), self.device)
            self._sent_parts = [part.numpy() for part in self._sent.split(self._lengths)]
            self._returned = _on_host(0, self.device)

    def begin(self, atoms: Frame) -> None:
        positions, cell, pbc, _ = self._sent_parts
        positions[: atoms.positions.size] = atoms.positions.ravel()
        cell[:], pbc[:] = atoms.cell.ravel(), atoms.pbc
        self.launch()

    def end(self, real: Counts) -> Ended:
        self._wait()
        edges, *values = self._returned.clone().split([1, *(shape.numel() for _, shape in self._shapes.values())])
        results = {}
        for (name, (dtype, shape)), flat in zip(self._shapes.items(), values, strict=True):
            rows = getattr(real, self.results[name])
            results[name] = flat.reshape(shape)[:rows].to(dtype)
        return Ended(int(edges), True, results)

    def _put_counts(self, atoms: int, pairs: int) -> None:
        self._wait()  # the host's memory may still be read
        self._sent.zero_()
        self._sent_parts[-1][:] = atoms, pairs

    def _receive(self) -> None:
        self._arrived.copy_(self._sent, non_blocking=True)

    def _cell_of_graph(self, cells: Tensor) -> Tensor:
        return cells[0]

    def _send(self, edges: Tensor, found: dict[str, Any]) -> None:
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        flat = torch.cat([edges.double().reshape(1), *(value.double().reshape(-1) for value in tensors.values())])
        if len(self._returned) != len(flat):  # in the first call, which is no capture
            self._shapes = {name: (value.dtype, value.shape) for name, value in tensors.items()}
            self._returned = _on_host(len(flat), self.device)
        self._returned.copy_(flat, non_blocking=True)


class FromDevice(LaunchedStep[Batch]):
    """Of a batch of systems whose positions are on the device, where its results stay."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._found_there: dict[str, Any] = {}
        with torch.inference_mode(False):
            # The number of edges, and whether the candidates serve.
            self._returned = _on_host(2, self.device)

    @torch.no_grad()
    def begin(self, atoms: Batch) -> None:
        if self.device.type == "cuda":
            self.memory.follow_stream(self.device)
        self._positions[: len(atoms.positions)].copy_(atoms.positions)
        self._cells.copy_(atoms.cells)
        self._found_there = self.launch()

    def end(self, real: Counts) -> Ended:
        results = self._real(self._found_there, real)  # queued while the device works
        self._wait()
        edges, serve = self._returned.tolist()
        return Ended(int(edges), bool(serve), results)

    def _put_counts(self, atoms: int, pairs: int) -> None:
        self._arrived.zero_()
        self._counts.copy_(torch.tensor([atoms, pairs]))

    def _send(self, edges: Tensor, found: dict[str, Any]) -> None:
        serve = self._there.serve(self._positions, self._cells, self.cutoff).all()
        self._returned.copy_(torch.stack((edges.double(), serve.double())), non_blocking=True)


def _on_host(length: int, device: torch.device) -> Tensor:
    """Zeros, float64, in memory that the device can read."""
    return torch.zeros(length, dtype=torch.float64, pin_memory=device.type == "cuda")
