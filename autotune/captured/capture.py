"""``autotune.capture``: a model whose steps of energies and forces are one launch each.

A GPU is faster than its host on small systems: the launches of some hundred kernels take longer than the kernels. A
CUDA graph launches all of them at once, but only for tensors of one size in one place. So a graph's atoms and edges are
padded with ghosts to steps of size, and copied to where the captured kernels read them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from autotune.captured.fields import Counts, Fields, best_fit, lost_input, padded_size
from autotune.captured.model_state import ModelState
from autotune.captured.package import package_for
from autotune.captured.padded_step import PaddedStep
from kernelgen.errors import InputError

OUTGROWN = ("capture", "eager")


def capture(
    model: torch.nn.Module,
    example: Mapping[str, Any] | None = None,
    *,
    growth: float = 1.25,
    kept: int = 4,
    outgrown: str = "capture",
    **options: Any,
) -> CapturedModel:
    """A module that takes and gives what ``model`` does, and computes energies, forces and stress in one CUDA graph.

        >>> model = autotune.capture(model, batch, compute_stress=True)
        >>> out = model(batch, compute_stress=True)      # out["forces"] [atoms, 3], as the model's

    model: of MACE (``MACE``, ``ScaleShiftMACE``), NequIP or SevenNet, best after :func:`autotune.accelerate`.
    example: the inputs of one call, captured at once, with the call's ``options``; else the first call captures.

    growth: numbers of atoms and edges are padded to steps, each so many times the last one (beyond 32768 the fourth
    root of it). Ghost atoms and ghost edges are a structure of their own, and add nothing to the real ones. kept: the
    number of captured sizes that stay, those used last; each has memory of its own on the device.

    outgrown: what happens to a graph that fits no captured size: ``capture`` it, or leave it to the model (``eager``),
    which is as fast for large systems. Calls that need gradients of the results (``training=True``), those that ask for
    other results, such as a Hessian, and those for MACE's energies alone under ``torch.no_grad`` are always left to it.

    A capture is thrown away when the model's modules, hooks, mode, dtype or device change, or a parameter gets other
    memory. Parameters that are written in place (an optimizer's step, ``load_state_dict``) are seen. Results are
    detached. What NequIP and SevenNet leave in the data beside them is left out: all of edges, ``node_attrs``,
    ``feature_norm_factor``; ``x``, ``node_attr``, ``atom_type``, ``scaled_atomic_energy``. On a CPU there is no graph:
    each call runs the model on the padded inputs.

    Raises UnsupportedError for other models, also those with a ``forward`` or hooks of their own; in a call, for inputs
    that the model reads and results that it gives and a captured step does not know; for ``accelerate(model,
    edge_weights="streamed")``, and on a GPU for a model with a part that waits for the device. InputError for fields of
    other lengths, and on a CPU for indices out of range.
    """
    captured = CapturedModel(model, growth=growth, kept=kept, outgrown=outgrown)
    if example is not None:
        captured(dict(example), **options)
    elif options:
        raise InputError(f"the options {sorted(options)} belong to the call on an example, and there is no example")
    return captured


class CapturedModel(torch.nn.Module):
    """Made by :func:`capture`. Attributes that it does not have are the model's.

    captures: captured sizes so far; replays: steps by them; eager_calls: calls that were left to the model.
    """

    def __init__(self, model: torch.nn.Module, *, growth: float, kept: int, outgrown: str) -> None:
        super().__init__()
        if not growth > 1:
            raise InputError(f"growth is {growth}; expected more than 1, such as 1.25")
        if kept < 1:
            raise InputError(f"kept is {kept}; expected the number of captured sizes that stay, at least 1")
        if outgrown not in OUTGROWN:
            raise InputError(f"outgrown is {outgrown!r}; expected one of {OUTGROWN}")
        if not isinstance(model, torch.nn.Module):
            raise InputError(f"model is of type {type(model).__name__}; expected a torch.nn.Module")
        if isinstance(model, CapturedModel):
            raise InputError("model is captured already; capture the model that it holds, its attribute model")
        self.package = package_for(model)
        self.model = model
        self.growth, self.kept, self.outgrown = growth, kept, outgrown
        self.captures = self.replays = self.eager_calls = 0
        self.training = model.training
        self._forget()

    def forget(self) -> None:
        """Free what was captured, its memory included; the next step captures again."""
        with self._lock:
            self._steps.clear()

    def _forget(self) -> None:
        # Least recently used first.
        self._steps: OrderedDict[tuple[Hashable, Counts], PaddedStep] = OrderedDict()
        self._state: ModelState | None = None
        self._cutoff = 0.0
        self._lock = threading.Lock()

    @property
    def sizes(self) -> tuple[Counts, ...]:
        """The captured numbers of atoms, edges and graphs, ghosts included, least recently used first."""
        return tuple(size for _, size in self._steps)

    def forward(self, inputs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The model's results for the model's ``inputs``, detached from them."""
        # Tensors are put into buffers by one call at a time.
        with self._lock:
            if not self.package.runs_eagerly(self.model, inputs, options):
                self._follow_the_model()
                try:
                    fields, real = self.package.fields(self.model, inputs, self._cutoff)
                except KeyError as missing:
                    raise InputError(
                        f"the inputs lack {missing}, which a captured step reads; pass it, or call the model itself, "
                        "uncaptured"
                    ) from missing
                found = self._found(fields, real, inputs, options)
                if found is not None:
                    return self.package.answer(self.model, inputs, found)
            self.eager_calls += 1
        return self.model(inputs, **options)

    def _follow_the_model(self) -> None:
        """Forget what was captured of a model that has changed since."""
        if self._state is None or not self._state.is_still():
            self._steps.clear()
            self.package = package_for(self.model)
            self._cutoff = self.package.cutoff(self.model)
            self._state = ModelState(self.model)

    def _found(
        self, fields: Fields, real: Counts, inputs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The results of the captured step that serves a graph, made if needed; None if none shall."""
        device = _device_of(self.model, fields)
        kind = (
            tuple(sorted(options.items())),
            tuple((name, field.signature) for name, field in fields.items()),
            *(device, *_settings(device)),
        )
        sizes = [size for known, size in self._steps if known == kind]
        size = best_fit(real, sizes, self.growth)
        if size is None and sizes and self.outgrown == "eager":
            return None
        if size is not None:
            step = self._steps[kind, size]
            self._steps.move_to_end((kind, size))
            return self._run(step, fields, real, inputs)
        size = padded_size(real, self.growth)
        while len(self._steps) >= self.kept:
            self._steps.popitem(last=False)
        step = self._new(size, fields, device, dict(options))
        found = self._run(step, fields, real, inputs)
        # Not before: a step whose first call failed is made anew by the next one.
        self._steps[kind, size] = step
        self.captures += 1
        return found

    def _run(self, step: PaddedStep, fields: Fields, real: Counts, inputs: Mapping[str, Any]) -> dict[str, Any]:
        found = step(fields, real)
        for name in step.asked:
            if name in inputs:
                raise lost_input(name)
        self.replays += 1
        return found

    def _new(self, size: Counts, fields: Fields, device: torch.device, options: dict[str, Any]) -> PaddedStep:
        def compute(given: dict[str, torch.Tensor], size: Counts) -> dict[str, Any]:
            return self.package.known_results(self.package.compute(self.model, given, size, options), given)

        return PaddedStep(size, fields, device, compute, self.package.results)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")
            if model is None:
                raise
            return getattr(model, name)

    def __getstate__(self) -> dict[str, Any]:
        # Captured graphs belong to this process and to this model's memory.
        return {name: value for name, value in self.__dict__.items() if name not in ("_steps", "_state", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def _device_of(model: torch.nn.Module, fields: Fields) -> torch.device:
    """Where the model is; where its inputs are if it has no parameters."""
    parameter = next(model.parameters(), None)
    return next(iter(fields.values())).tensor.device if parameter is None else parameter.device


def _settings(device: torch.device) -> tuple[Hashable, ...]:
    """torch's settings that change what kernels a model runs."""
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
