"""The operator of spherical harmonics, a differentiable torch function; and a product with harmonics of vectors.

``build_harmonics`` makes a :class:`HarmonicsOperator`. Its signature gives its derivatives and the torch ops
``equitune::sh_*`` (``kernelgen.ops.library``); here is how its kernels run. ``run`` is the call on rows without
autograd. Kernels compile at first use, one for each direction and set of wanted gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import (
    BACKWARD,
    DOUBLE_BACKWARD,
    FORWARD,
    HARMONICS_DIRECTIONS,
    Direction,
    HarmonicsDirection,
    forward,
)
from kernelgen.compat import is_eager
from kernelgen.device import device_facts
from kernelgen.errors import InputError, ProblemError
from kernelgen.kernels.spec import BUFFERS, Spec
from kernelgen.kernels.spherical_harmonics import (
    HARMONICS_SCHEDULES,
    HarmonicsSchedule,
    HarmonicsSpec,
    default_harmonics_schedule,
)
from kernelgen.ops.autograd import ProductValue
from kernelgen.ops.base import DTYPES, rebuilds, register
from kernelgen.ops.library import DifferentiableOperator, Signature, define, differentiable
from kernelgen.ops.product import Operator
from kernelgen.problem.other_kinds import HarmonicsProblem, VectorProblem
from kernelgen.runtime.call import WATCHERS, AnyRunner, Graph, Operands, RunnerKey, empty, tell, tell_of_preparing
from kernelgen.runtime.kernel import PLACE, Kernel, load_kernel

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
    schedule_types = HARMONICS_SCHEDULES

    def __init__(
        self, problem: HarmonicsProblem, schedule: Schedules, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(problem, schedule, dtype, device)
        self.dim_out, self.widths = problem.dim_out, {"x": 3, "g": problem.dim_out}
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
        pointers, kept, widths = [0] * len(BUFFERS), [], self.widths
        for name, tensor in given.items():
            kept.append(self._ready(_NAMES[name], tensor, (rows, widths[name[-1]]), v))
            pointers[PLACE[name]] = kept[-1].data_ptr()
        found = {}
        for slot in direction.outputs:
            found[slot] = out = empty((rows, widths[slot]), v)
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


# A product with the spherical harmonics of vectors, which the product's kernels compute.
#
# :class:`HarmonicProduct` is made of the operators of both and is differentiable twice. One kernel computes the value,
# and one the first gradients; they read three numbers an edge instead of a row of harmonics. Gradients that will be
# differentiated again, and all that torch traces, use the kernels of both operators, one after the other.


# Directions whose kernels can compute harmonics.
FUSED = ("forward", "backward", "source_backward", "edge_backward")


class HarmonicProduct:
    """Call it like an :class:`Operator`, with vectors ``[num_edges, 3]`` instead of y.

    product, harmonics: operators of one dtype and device; ProblemError if the harmonics do not fit the product's second
    input. inside: the directions of FUSED whose kernels compute the harmonics; for others, both kernels run one after
    the other. Products other than weighted ``uvu`` with one copy of the second input have no such directions.
    """

    def __init__(self, product: Operator, harmonics: HarmonicsOperator, inside: Iterable[str] = FUSED) -> None:
        self.problem = VectorProblem(product.problem, harmonics.problem)
        if harmonics.dtype is not product.dtype:
            raise ProblemError(f"harmonics are {harmonics.dtype} and the product {product.dtype}; expected one dtype")
        self.product, self.harmonics = product, harmonics
        self.inside = frozenset(inside) & frozenset(FUSED if product.problem.is_channelwise else ())
        self._runners: dict[RunnerKey, AnyRunner] = {}

    def forward(self, x: Tensor, v: Tensor, w: Tensor, *edges: Any, **how: Any) -> Tensor:
        """The product of x with the harmonics of v, differentiable twice with respect to x, v and w.

        edges: sender and receiver. how: the other arguments of :meth:`Operator.forward`.
        """
        if not self.inside or not is_eager(x, v, w):
            return self.product(x, self.harmonics(v), w, *edges, **how)
        graph = self.graph(x, v, *self.product.edges(x, *edges, **how))
        w = self.product.one_row(w)
        if torch.is_grad_enabled() and (x.requires_grad or v.requires_grad or w.requires_grad):
            return ProductValue.apply(x, v, w, graph, self.product, self)[0]
        return self.run_on(graph, forward(), (x, None, v, None, w, None, None, None))["g"]

    __call__ = forward

    def graph(self, x: Tensor, v: Tensor, *edges: Any) -> Graph:
        """A call's checked graph, with the product's shapes (y: the harmonics)."""
        if v.dim() != 2 or v.shape[1] != 3:
            raise InputError(f"v has shape {tuple(v.shape)}; expected one vector an edge, (num_edges, 3)")
        return self.product.graph(x, v, *edges)

    def run_on(self, graph: Graph, direction: Direction, operands: Operands, poison: bool = False) -> dict[str, Tensor]:
        """Run a direction of first derivatives, with v as operand y; gradients by slot, that of v as ``y``."""
        if direction.name in self.inside:
            of_vectors = graph._replace(shapes=graph.shapes | {"y": (graph.num_edges, 3)})
            return self.product.run_on(of_vectors, direction, operands, poison, self._runners, self.harmonics.problem)
        v = operands[2]
        assert v is not None
        y = self.harmonics.run(FORWARD, {"x": v}, poison=poison)["g"] if "y" in direction.operands else None
        found = self.product.run_on(graph, direction, (*operands[:2], y, *operands[3:]), poison)
        if "y" in found:
            found["y"] = self.harmonics.run(BACKWARD, {"x": v, "g": found["y"]}, poison=poison)["x"]
        return found

    def specs(self, name: str) -> list[Spec]:
        """Specs of the product's kernels of a direction."""
        found = self.product.specs(name)
        given = self.harmonics.problem if name in self.inside else None
        return [dataclasses.replace(spec, harmonics=given) for spec in found]

    def resources(self, name: str) -> dict[str, Any]:
        """Resource usage of the product's kernel of a direction; compiles it if needed."""
        return load_kernel(self.specs(name)[-1]).resources
