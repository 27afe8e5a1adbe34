"""The operator of spherical harmonics, a differentiable torch function.

``build_harmonics`` makes a :class:`HarmonicsOperator`. Its signature gives its derivatives and the torch ops
``equitune::sh_*`` (``kernelgen.ops.library``); here is how its kernels run. ``run`` is the call on rows without
autograd. Kernels compile at first use, one for each direction and set of wanted gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import BACKWARD, DOUBLE_BACKWARD, FORWARD, HARMONICS_DIRECTIONS, HarmonicsDirection
from kernelgen.device import device_facts
from kernelgen.errors import ProblemError
from kernelgen.kernels.spec import BUFFERS
from kernelgen.kernels.spherical_harmonics import (
    HarmonicsSchedule,
    HarmonicsSpec,
    default_harmonics_schedule,
    harmonics_schedule_from_dict,
)
from kernelgen.ops.base import DTYPES, PLACE, rebuilds, register
from kernelgen.ops.library import DifferentiableOperator, Signature, define, differentiable
from kernelgen.problem.harmonics import HarmonicsProblem
from kernelgen.runtime.call import empty
from kernelgen.runtime.kernel import Kernel, load_kernel
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

HARMONICS = Signature(
    name="sh",
    slots="x",
    inputs=("v",),
    tangents=("t",),
    noun="spherical harmonics",
    instead="e3nn.o3.spherical_harmonics",
)
define(HARMONICS)

Schedules = HarmonicsSchedule | Mapping[str, HarmonicsSchedule] | None
# What errors call the buffers that a kernel reads.
_NAMES = {"x": "v", "tx": "the tangent t", "g": "the cotangent g"}


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


class HarmonicsOperator(DifferentiableOperator):
    """Spherical harmonics with their schedules. Call it like a function; it is differentiable twice."""

    kind = "harmonics"
    signature = HARMONICS
    row_slots = "xg"
    directions = HARMONICS_DIRECTIONS
    problem_type = HarmonicsProblem
    read_schedule = harmonics_schedule_from_dict

    def __init__(
        self, problem: HarmonicsProblem, schedule: Schedules, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(problem, schedule, dtype, device)
        self.dim_out = problem.dim_out
        self._kernels: dict[tuple[HarmonicsDirection, int], Kernel] = {}

    def forward(self, v: Tensor) -> Tensor:
        """v ``[..., 3]`` -> harmonics ``[..., dim_out]``, differentiable twice with respect to v.

        Raises InputError for a wrong last dimension, dtype or device.
        """
        if v.dim() == 0 or v.shape[-1] != 3 or v.dtype is not self.dtype or not self._is_here(v):
            raise self._mismatch("v", v, "(..., 3)")
        if v.dim() == 2:
            return differentiable(self, v)
        return differentiable(self, v.reshape(-1, 3)).reshape(*v.shape[:-1], self.dim_out)

    __call__ = forward

    def op_forward(self, v: Tensor) -> Tensor:
        return self.run(FORWARD, {"x": v})["g"]

    def op_backward(self, v: Tensor, g: Tensor, outputs: str) -> dict[str, Tensor]:
        return self.run(BACKWARD, {"x": v, "g": g})

    def op_double_backward(self, v: Tensor, g: Tensor, t: Tensor, outputs: str) -> dict[str, Tensor]:
        if outputs not in DOUBLE_BACKWARD:
            raise ProblemError(f"outputs are {outputs!r}; expected one of {tuple(DOUBLE_BACKWARD)}")
        return self.run(DOUBLE_BACKWARD[outputs], {"x": v, "g": g, "tx": t})

    def spec(self, direction: HarmonicsDirection, device: torch.device | None = None) -> HarmonicsSpec:
        return self._kernel_spec(direction, self.schedules[direction.name], device)

    def _kernel_spec(
        self, direction: HarmonicsDirection, schedule: HarmonicsSchedule, device: torch.device | None = None
    ) -> HarmonicsSpec:
        facts = device_facts(device or self.device)
        return HarmonicsSpec(self.problem, direction, schedule, DTYPES[self.dtype], facts)

    def _default_schedule(self, direction: HarmonicsDirection) -> HarmonicsSchedule:
        facts = device_facts(self.device)
        return default_harmonics_schedule(self.problem, direction, DTYPES[self.dtype], facts)

    def run(
        self, direction: HarmonicsDirection, given: Mapping[str, Tensor], *, poison: bool = False
    ) -> dict[str, Tensor]:
        """Outputs of a direction by slot, without autograd (forward: ``g``, harmonics ``[rows, dim_out]``).

        given: what the direction reads of vectors ``[rows, 3]`` as ``x``, cotangents ``[rows, dim_out]`` as ``g`` and
        tangents ``[rows, 3]`` as ``tx``. poison: fill outputs with NaN before the kernel runs.
        """
        v = given["x"]
        rows, device = v.shape[0] if v.dim() else 0, v.get_device()
        pointers, kept = [0] * len(BUFFERS), []
        for name, tensor in given.items():
            kept.append(self._ready(_NAMES[name], tensor, (rows, self.dim_out if name == "g" else 3), v))
            pointers[PLACE[name]] = kept[-1].data_ptr()
        found = {}
        for slot in direction.outputs:
            found[slot] = out = empty((rows, 3 if slot == "x" else self.dim_out), v)
            pointers[PLACE[f"out_{slot}"]] = out.data_ptr()
            if poison:
                out.fill_(torch.nan)
        if rows == 0:
            return found
        kernel = self._kernels.get((direction, device))
        if kernel is None:
            tell_of_preparing()
            kernel = self._kernels[direction, device] = load_kernel(self.spec(direction, v.device))
        if WATCHERS:
            tell(self, direction, rows, rows, None, None)
        kernel.run(pointers, rows, rows, rows, device)
        return found


rebuild_harmonics = HarmonicsOperator.rebuild
rebuilds("harmonics", rebuild_harmonics)
