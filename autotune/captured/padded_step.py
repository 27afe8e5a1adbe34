"""A model's step at one size: static buffers, filled with a graph and ghosts, and on a GPU a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.captured.fields import Counts, Field, Fields, GivenFields
from autotune.captured.volumes import VolumesByProducts
from kernelgen.errors import UnsupportedError, cause_of
from kernelgen.runtime.known_graphs import known_in_capture

# Calls before a capture: kernels are compiled, and torch's libraries choose theirs.
_WARM_UP = 3


Compute = Callable[[dict[str, Tensor], Counts], dict[str, Any]]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: torch's libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Python frees no cycles within: the memory of an older graph that went in the middle of a capture would end it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class PaddedStep:
    """Computes graphs that fit ``size``. On a CPU each call runs the model on the buffers, padded alike.

    compute: the model's results of padded tensors. results: what the rows of each are. replays: launches of the graph.
    """

    def __init__(
        self, size: Counts, fields: Fields, device: torch.device, compute: Compute, results: Mapping[str, str]
    ) -> None:
        self.size, self.device, self.compute, self.results = size, device, compute, results
        for name, field in fields.items():
            field.check_shape(name)  # not in each call: it belongs to a field's signature
        with torch.inference_mode(False):
            self.buffers = {name: field.empty(size, device) for name, field in fields.items()}
        # Of the graph that is in the buffers; None while a call fills them, which may raise or be interrupted.
        self.filled: Counts | None = None
        # Names of inputs that the model looked for and a step does not pass on.
        self.asked: set[str] = set()
        # Rows of ghosts that are always the same, on the device.
        self._ghosts: dict[str, Tensor] = {}
        self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: dict[str, Any] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, fields: Fields, real: Counts) -> dict[str, Any]:
        """The results of the real atoms, edges and graphs, in memory of their own."""
        if self.device.type != "cuda":
            self._fill(fields, real)
            return self._real(self._computed(), real)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self._stream not in (None, stream):
                stream.wait_stream(self._stream)
            self._stream = stream
            self._fill(fields, real)
            if self._graph is None:
                self._capture(stream)
            assert self._graph is not None
            self._graph.replay()
            self.replays += 1
            return self._real(self._found, real)

    @torch.no_grad()
    def _fill(self, fields: Fields, real: Counts) -> None:
        last, self.filled = self.filled, None
        for name, field in fields.items():
            buffer, length = self.buffers[name], field.length(real)
            if field.tensor.shape[field.axis] != length or (field.below and field.tensor.is_cpu):
                field.check(name, real)
            buffer.narrow(field.axis, 0, length).copy_(field.tensor)
            if _has_ghosts_of(last, field, real):
                continue
            rest = buffer.narrow(field.axis, length, buffer.shape[field.axis] - length)
            if callable(field.ghost):
                rest.copy_(field.ghost(real, self.size, self.device))
            elif isinstance(field.ghost, Tensor):
                if name not in self._ghosts:
                    self._ghosts[name] = field.ghost.to(buffer)
                rest.copy_(self._ghosts[name])
            else:
                rest.fill_(field.ghost)
        self.filled = real

    def _computed(self) -> dict[str, Any]:
        """By name of those results that the model gives, without autograd's graph."""
        given = GivenFields({name: buffer.detach() for name, buffer in self.buffers.items()}, self.asked)
        with torch.inference_mode(False), torch.enable_grad(), VolumesByProducts():
            out = self.compute(given, self.size)
        found = {name: out[name] for name in self.results if name in out}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}

    def _capture(self, current: torch.cuda.Stream) -> None:
        side = _side_stream(self.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    self._computed()
        finally:  # what a failed call left there still reads the buffers
            current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        try:
            with _nothing_collected(), known_in_capture(), capturing:
                found = self._computed()
        except RuntimeError as error:
            raise UnsupportedError(
                f"the model cannot be captured in a CUDA graph: {cause_of(error)}; something in it (a hook, a block "
                "that is not the package's) waits for the device or copies from the host"
            ) from error
        self._found, self._graph = found, graph

    def _real(self, found: Mapping[str, Any], real: Counts) -> dict[str, Any]:
        return {
            name: value.narrow(0, 0, getattr(real, self.results[name])).clone() if isinstance(value, Tensor) else value
            for name, value in found.items()
        }


def _has_ghosts_of(last: Counts | None, field: Field, real: Counts) -> bool:
    """Whether a buffer that was filled with a graph of ``last`` has the ghosts of ``real``."""
    if last is None or callable(field.ghost):
        return last == real
    return getattr(last, field.per) == getattr(real, field.per)
