"""The operator of spherical harmonics, a differentiable torch function.

``build_harmonics`` makes a :class:`HarmonicsOperator`. Its ``forward`` uses autograd, or the torch ops of
``kernelgen.ops.harmonics`` if torch traces. ``run_*`` are the calls on rows without autograd. Kernels compile at
first use, one for each direction and set of wanted gradients.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import BACKWARD, DOUBLE_BACKWARD, FORWARD, HARMONICS_DIRECTIONS, HarmonicsDirection
from kernelgen.compat import is_eager, is_transforming
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ProblemError, UnsupportedError
from kernelgen.kernels.harmonics.schedule import HarmonicsSchedule, harmonics_schedule_from_dict
from kernelgen.kernels.product.defaults import default_harmonics_schedule
from kernelgen.kernels.spec import BUFFERS, HarmonicsSpec
from kernelgen.ops.base import DTYPES, RegisteredOperator, rebuilds, register, resolve
from kernelgen.ops.library import HESSIAN_PRODUCTS, Maybe, define, only, used_slots
from kernelgen.ops.transforms import Rows, call
from kernelgen.problem.harmonics import HarmonicsProblem
from kernelgen.runtime.call import aligned, empty
from kernelgen.runtime.kernel import Kernel, load_kernel
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

# The torch ops ``equitune::sh_*``, which make spherical harmonics visible to fake tensors, compile and export.
#
# An op gets its operator as text (``HarmonicsOperator.text``), from which any process can rebuild it. Gradients that
# ``outputs`` does not name are empty tensors. Eager calls bypass these ops: see ``kernelgen.ops.harmonics``.

SCHEMAS = {
    "sh_forward": "(Tensor v, str spec) -> Tensor",
    "sh_backward": "(Tensor v, Tensor g, str spec) -> Tensor",
    "sh_double_backward": "(Tensor v, Tensor g, Tensor t, str outputs, str spec) -> (Tensor, Tensor)",
}


def no_third_derivative(*_: Any) -> tuple:
    """Refuse the gradient of second derivatives."""
    raise UnsupportedError(
        f"third derivatives of spherical harmonics are not generated, {HESSIAN_PRODUCTS}; detach the second "
        "derivatives, or differentiate e3nn.o3.spherical_harmonics instead"
    )


def _sh_forward(v: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(v.shape[0]).run_forward(v)


def _sh_backward(v: Tensor, g: Tensor, spec: str) -> Tensor:
    return resolve(spec).for_size(v.shape[0]).run_backward(v, g)


def _sh_double_backward(v: Tensor, g: Tensor, t: Tensor, outputs: str, spec: str) -> tuple[Tensor, Tensor]:
    found = resolve(spec).for_size(v.shape[0]).run_double_backward(v, g, t, outputs)
    return found.get("x", v.new_empty(0)), found.get("g", v.new_empty(0))


def _fake_forward(v: Tensor, spec: str) -> Tensor:
    return v.new_empty((v.shape[0], resolve(spec).dim_out))


def _fake_backward(v: Tensor, g: Tensor, spec: str) -> Tensor:
    return v.new_empty(v.shape)


def _fake_double_backward(v: Tensor, g: Tensor, t: Tensor, outputs: str, spec: str) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape if "x" in outputs else (0,)), v.new_empty(g.shape if "g" in outputs else (0,))


def _setup_forward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    v, ctx.spec = inputs
    ctx.save_for_backward(v)


def _backward_of_forward(ctx: Any, g: Tensor) -> tuple:
    (v,) = ctx.saved_tensors
    return call("sh_backward", v, g, ctx.spec), None


def _setup_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    v, g, ctx.spec = inputs
    ctx.save_for_backward(v, g)


def _backward_of_backward(ctx: Any, t: Tensor) -> tuple:
    outputs = "".join(slot for slot, needed in zip("xg", ctx.needs_input_grad, strict=False) if needed)
    found = call("sh_double_backward", *ctx.saved_tensors, t, outputs, ctx.spec)
    return (*only(found, "xg", outputs), None)


def _jvp_of_forward(ctx: Any, t: Tensor, _: None) -> Tensor:
    """The change along t equals the gradient of <t, first gradient> with respect to g, for any g."""
    (v,) = ctx.saved_tensors
    g = v.new_zeros((v.shape[0], resolve(ctx.spec).dim_out))
    return call("sh_double_backward", v, g, t, "g", ctx.spec)[1]


def _jvp_of_backward(ctx: Any, t: Tensor, tg: Tensor, _: None) -> Tensor:
    found = along_tangents(ctx.saved_tensors, (t, tg), ctx.spec)
    assert found is not None
    return found


def along_tangents(primal: tuple[Tensor, ...], tangents: tuple[Maybe, ...], spec: str) -> Maybe:
    """The change of the first gradient along tangents of v and g (None: zero), by differentiable ops."""
    (v, g), (t, tg) = primal, tangents
    terms = [] if t is None else [call("sh_double_backward", v, g, t, "x", spec)[0]]
    if tg is not None:
        terms.append(call("sh_backward", v, tg, spec))
    return functools.reduce(torch.add, terms) if terms else None


def _setup_double_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2])
    ctx.outputs, ctx.spec = inputs[3:]


def _backward_of_double_backward(ctx: Any, tx: Maybe, tg: Maybe) -> tuple:
    """By the tangent, in which it is linear, it is the change of the first gradient along the cotangents."""
    if used_slots(ctx, "xg"):
        return no_third_derivative()
    used = tx if "x" in ctx.outputs else None, tg if "g" in ctx.outputs else None
    return None, None, along_tangents(ctx.saved_tensors, used, ctx.spec), None, None


def _rows(count: int) -> Rows:
    """The rule for vmap: all tensors of an op have one row a vector."""
    return lambda arguments, in_dims: tuple(range(count))


define(
    *("sh_forward", SCHEMAS["sh_forward"], _sh_forward, _fake_forward, _backward_of_forward, _setup_forward),
    jvp=_jvp_of_forward,
    rows=_rows(1),
)
define(
    *("sh_backward", SCHEMAS["sh_backward"], _sh_backward, _fake_backward, _backward_of_backward, _setup_backward),
    jvp=_jvp_of_backward,
    rows=_rows(2),
)
define(
    *("sh_double_backward", SCHEMAS["sh_double_backward"], _sh_double_backward, _fake_double_backward),
    *(_backward_of_double_backward, _setup_double_backward),
    jvp=no_third_derivative,
    rows=_rows(3),
)


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
