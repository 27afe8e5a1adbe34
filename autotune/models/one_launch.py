"""Steps of moving atoms, each one launch: neighbours, model and results.

A calculator has positions on the host and wants results there. A captured step of ``autotune.models.capture`` takes a
graph on the device; finding the graph, copying it and fetching the results took longer than the model on small systems.
Here one CUDA graph does all of it:

1. Positions and cell are copied from the host, in one piece.
2. Of the candidates (``autotune.models.neighbors``) those within the cutoff become the edges, and ghosts fill the rest.
3. The model computes.
4. The results and the number of edges are copied to the host, in one piece.

Once the candidates serve, the launch is made. What else must hold for its results is looked at while the device works:
that the atoms are the same, that the model is the one that was captured; and after it, that the edges had room. If one
does not, the results are thrown away, what is wrong is mended, and the step is launched again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.models.capture import CapturedModel, along_x, device_of, kind_of_step, settings_of
from autotune.models.neighbors import AtomicGraph, Candidates
from autotune.models.padding import (
    Compute,
    Counts,
    Field,
    Fields,
    GraphMemory,
    PaddedStep,
    best_fit,
    ghost_ends_there,
    padded_size,
    step_above,
)


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
        fields = {name: _without_edges(field) for name, field in fields.items()}
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


def _without_edges(field: Field) -> Field:
    return field._replace(tensor=field.tensor.narrow(field.axis, 0, 0)) if field.per == "edges" else field


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
