"""The operator of spherical harmonics, a differentiable torch function.

``build_harmonics`` makes a :class:`HarmonicsOperator`. Its ``forward`` uses autograd, or the torch ops of
``kernelgen.ops.harmonics_ops`` if torch traces. ``run_*`` are the calls on rows without autograd. Kernels compile at
first use, one for each direction and set of wanted gradients.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.device import device_facts
from kernelgen.errors import InputError, ProblemError
from kernelgen.ops.base import DTYPES, RegisteredOperator
from kernelgen.ops.harmonics_ops import along_tangents, no_third_derivative
from kernelgen.ops.registry import rebuilds, register
from kernelgen.ops.torch_ops import only, used_slots
from kernelgen.ops.transforms import call
from kernelgen.plan.defaults import default_harmonics_schedule
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.runtime.allocation import empty
from kernelgen.runtime.arguments import aligned
from kernelgen.runtime.kernel import Kernel, load_kernel
from kernelgen.schedule.kernel_spec import BUFFERS, HarmonicsSpec
from kernelgen.schedule.spherical_harmonics import HarmonicsSchedule, harmonics_schedule_from_dict
from kernelgen.terms.directions import BACKWARD, DOUBLE_BACKWARD, FORWARD, HARMONICS_DIRECTIONS, HarmonicsDirection
from kernelgen.tracing import is_eager, is_transforming
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

Schedules = HarmonicsSchedule | Mapping[str, HarmonicsSchedule] | None
_V, _T, _G, _OUT_V, _OUT_G = (BUFFERS.index(name) for name in ("x", "tx", "g", "out_x", "out_g"))


def build_harmonics(
    problem: HarmonicsProblem,
    schedule: Schedules = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HarmonicsOperator:
    """The operator of spherical harmonics.

        >>> operator = build_harmonics(HarmonicsProblem((0, 1, 2, 3), "component", True))
        >>> values = operator(torch.randn(5, 7, 3))     # [5, 7, 16], differentiable twice

    schedule: one for every direction, or by direction name (``forward``, ``backward``, ``double_backward``);
    directions without one get the default schedule. Raises ScheduleError for an illegal schedule, InputError for a
    dtype other than float32 and float64.
    """
    return register(HarmonicsOperator(problem, schedule, dtype, torch.device(device)))


def rebuild_harmonics(text: str) -> HarmonicsOperator:
    """The operator with this ``HarmonicsOperator.text``."""
    data = json.loads(text)
    return build_harmonics(
        HarmonicsProblem.from_key(data["problem"]),
        {name: harmonics_schedule_from_dict(knobs) for name, knobs in data["schedules"].items()},
        dtype=getattr(torch, data["dtype"]),
        device=data["device"],
    )


class HarmonicsOperator(RegisteredOperator):
    """Spherical harmonics with their schedules. Call it like a function; it is differentiable twice."""

    directions = HARMONICS_DIRECTIONS

    def __init__(
        self, problem: HarmonicsProblem, schedule: Schedules, dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(f"dtype is {dtype}; expected torch.float32 or torch.float64")
        self.problem, self.dtype, self.device = problem, dtype, device
        self.dim_out = problem.dim_out
        self.schedules = self._complete(schedule)
        self.text = json.dumps(
            {
                "problem": problem.key,
                "dtype": DTYPES[dtype],
                "device": device.type,
                "schedules": {name: schedule.to_dict() for name, schedule in self.schedules.items()},
            },
            sort_keys=True,
        )
        self._kernels: dict[tuple[HarmonicsDirection, int], Kernel] = {}

    def forward(self, v: Tensor) -> Tensor:
        """v ``[..., 3]`` -> harmonics ``[..., dim_out]``, differentiable twice with respect to v.

        Raises InputError for a wrong last dimension, dtype or device.
        """
        if v.dim() == 0 or v.shape[-1] != 3 or v.dtype is not self.dtype or v.device.type != self.device.type:
            raise self._mismatch("v", v, "(..., 3)")
        if v.dim() == 2:
            return harmonics(v, self)
        return harmonics(v.reshape(-1, 3), self).reshape(*v.shape[:-1], self.dim_out)

    __call__ = forward

    def for_size(self, rows: int) -> HarmonicsOperator:
        """The operator for a number of vectors: this one, unless it is a family."""
        return self

    def run_forward(self, v: Tensor, *, poison: bool = False) -> Tensor:
        """Harmonics ``[rows, dim_out]`` of v ``[rows, 3]``, without autograd.

        poison (also below): fill outputs with NaN before the kernel runs.
        """
        out = self._empty(v, self.dim_out, poison)
        self._run(FORWARD, v, {_V: v}, {_OUT_G: out})
        return out

    def run_backward(self, v: Tensor, g: Tensor, *, poison: bool = False) -> Tensor:
        """The gradient ``[rows, 3]`` of sum_i g_i Y_i(v), for cotangents g ``[rows, dim_out]``."""
        out = self._empty(v, 3, poison)
        self._run(BACKWARD, v, {_V: v, _G: g}, {_OUT_V: out})
        return out

    def run_double_backward(
        self, v: Tensor, g: Tensor, t: Tensor, outputs: str = "xg", *, poison: bool = False
    ) -> dict[str, Tensor]:
        """Gradients of <t, first gradient> for t ``[rows, 3]``: ``x`` with respect to v, ``g`` with respect to g."""
        if outputs not in DOUBLE_BACKWARD:
            raise ProblemError(f"outputs are {outputs!r}; expected one of {tuple(DOUBLE_BACKWARD)}")
        found = {slot: self._empty(v, 3 if slot == "x" else self.dim_out, poison) for slot in outputs}
        results = {_OUT_V if slot == "x" else _OUT_G: out for slot, out in found.items()}
        self._run(DOUBLE_BACKWARD[outputs], v, {_V: v, _G: g, _T: t}, results)
        return found

    def spec(self, direction: HarmonicsDirection, device: torch.device | None = None) -> HarmonicsSpec:
        """Spec of the kernel of a direction."""
        facts = device_facts(device or self.device)
        return HarmonicsSpec(self.problem, direction, self.schedules[direction.name], DTYPES[self.dtype], facts)

    def __repr__(self) -> str:
        return f"HarmonicsOperator({self.problem.key!r}, {self.dtype}, {self.device})"

    def specs(self, direction_name: str) -> list[HarmonicsSpec]:
        """Spec of the kernel of a direction with all its outputs."""
        return [self.spec(self._direction(direction_name))]

    def _kernel_spec(self, direction: HarmonicsDirection, schedule: HarmonicsSchedule) -> HarmonicsSpec:
        return HarmonicsSpec(self.problem, direction, schedule, DTYPES[self.dtype], device_facts(self.device))

    def _default_schedule(self, direction: HarmonicsDirection) -> HarmonicsSchedule:
        facts = device_facts(self.device)
        return default_harmonics_schedule(self.problem, direction, DTYPES[self.dtype], facts)

    def _run(self, direction: HarmonicsDirection, v: Tensor, given: dict[int, Tensor], outs: dict[int, Tensor]) -> None:
        """Fill ``outs``; keys are positions among the kernel's pointers."""
        rows, index = v.shape[0], v.get_device()
        pointers, kept = [0] * len(BUFFERS), []
        for place, tensor in given.items():
            kept.append(self._ready(BUFFERS[place], tensor, (rows, self.dim_out if place == _G else 3), v))
            pointers[place] = kept[-1].data_ptr()
        if rows == 0:
            return
        for place, out in outs.items():
            pointers[place] = out.data_ptr()
        kernel = self._kernels.get((direction, index))
        if kernel is None:
            tell_of_preparing()
            kernel = self._kernels[direction, index] = load_kernel(self.spec(direction, v.device))
        if WATCHERS:
            tell(self, direction, rows, rows, None, None)
        kernel.run(pointers, rows, rows, rows, index)

    def _ready(self, buffer: str, tensor: Tensor, shape: tuple[int, int], v: Tensor) -> Tensor:
        """The tensor, copied if it is not contiguous and aligned; InputError if it does not fit."""
        elsewhere = tensor.device != v.device or tensor.device.type != self.device.type
        if tensor.shape != shape or tensor.dtype is not self.dtype or elsewhere:
            name = {"x": "v", "tx": "the tangent t", "g": "the cotangent g"}[buffer]
            raise self._mismatch(name, tensor, str(shape), v.device)
        return aligned(tensor)

    def _mismatch(self, name: str, tensor: Tensor, shape: str, device: torch.device | None = None) -> InputError:
        where = self.device.type if device is None or device.type != self.device.type else device
        return InputError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; expected {self.dtype} {shape} on "
            f"{where}: convert it, or build an operator for its dtype and device"
        )

    def _empty(self, v: Tensor, size: int, poison: bool) -> Tensor:
        """A new tensor with as many rows as v (not yet checked: it may have any shape)."""
        rows = v.shape[0] if v.dim() else 0
        out = empty((rows, size), v)
        return out.fill_(torch.nan) if poison else out


def harmonics(v: Tensor, operator: HarmonicsOperator) -> Tensor:
    """The operator's values ``[rows, dim_out]`` of v ``[rows, 3]``, differentiable twice."""
    if not is_eager(v):
        return call("sh_forward", v, operator.text)
    if torch.is_grad_enabled() and v.requires_grad:
        return _Forward.apply(v, operator)
    return operator.run_forward(v)


def gradient(v: Tensor, g: Tensor, operator: HarmonicsOperator) -> Tensor:
    """The gradient ``[rows, 3]`` of sum_i g_i Y_i(v), differentiable once in v and g, in a backward pass."""
    if is_transforming(g):
        return call("sh_backward", v, g, operator.text)
    return _Backward.apply(v, g, operator) if torch.is_grad_enabled() else operator.run_backward(v, g)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, operator: HarmonicsOperator) -> Tensor:
        ctx.save_for_backward(v)
        ctx.operator = operator
        return operator.run_forward(v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors
        return gradient(v, g, ctx.operator), None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, operator: HarmonicsOperator) -> Tensor:
        ctx.save_for_backward(v, g)
        ctx.operator = operator
        return operator.run_backward(v, g)

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor | None, ...]:
        outputs = used_slots(ctx, "xg")
        if not outputs:
            return None, None, None
        if is_transforming(t):
            found = call("sh_double_backward", *ctx.saved_tensors, t, outputs, ctx.operator.text)
            return (*only(found, "xg", outputs), None)
        if torch.is_grad_enabled():
            return (*_Second.apply(*ctx.saved_tensors, t, outputs, ctx.operator), None)
        by_slot = ctx.operator.run_double_backward(*ctx.saved_tensors, t, outputs)
        return by_slot.get("x"), by_slot.get("g"), None


class _Second(torch.autograd.Function):
    """Second derivatives along a tangent t of v, which they are linear in; gradients by v and g are third ones."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, t: Tensor, outputs: str, operator: HarmonicsOperator) -> tuple:
        ctx.save_for_backward(v, g)
        ctx.set_materialize_grads(False)
        ctx.operator = operator
        found = operator.run_double_backward(v, g, t, outputs)
        return found.get("x"), found.get("g")

    @staticmethod
    def backward(ctx: Any, tx: Tensor | None, tg: Tensor | None) -> tuple:
        if used_slots(ctx, "xg"):
            return no_third_derivative()
        return None, None, along_tangents(ctx.saved_tensors, (tx, tg), ctx.operator.text), None, None


rebuilds("harmonics", rebuild_harmonics)
