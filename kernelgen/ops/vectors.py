"""A product with the spherical harmonics of vectors, which the product's kernels compute.

:class:`HarmonicProduct` is made of the operators of both and is differentiable twice. One kernel computes the value,
and one the first gradients; they read three numbers an edge instead of a row of harmonics. Gradients that will be
differentiated again, and all that torch traces, use the kernels of both operators, one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kernelgen.arithmetic.directions import BACKWARD, FORWARD, Direction, backward, forward
from kernelgen.compat import is_eager, is_transforming
from kernelgen.errors import InputError, ProblemError
from kernelgen.kernels.spec import Spec
from kernelgen.ops.autograd import first_gradients, gradient_of_product, sole_leaves, wanted_gradients
from kernelgen.ops.harmonics import HarmonicsOperator
from kernelgen.ops.library import Maybe, gradients
from kernelgen.ops.product import Operator
from kernelgen.problem.harmonics import VectorProblem
from kernelgen.runtime.call import Graph, Operands, empty
from kernelgen.runtime.graph import EdgeOrder
from kernelgen.runtime.kernel import load_kernel
from kernelgen.runtime.runner import AnyRunner, RunnerKey
from kernelgen.watchers import WATCHERS, tell, tell_of_preparing

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

    def forward(
        self,
        x: Tensor,
        v: Tensor,
        w: Tensor,
        sender: Tensor | None = None,
        receiver: Tensor | None = None,
        *,
        num_out: int | None = None,
        order: EdgeOrder | None = None,
        is_sorted: bool = False,
    ) -> Tensor:
        """The product of x with the harmonics of v, differentiable twice with respect to x, v and w."""
        if not self.inside or not is_eager(x, v, w):
            y = self.harmonics(v)
            return self.product(x, y, w, sender, receiver, num_out=num_out, order=order, is_sorted=is_sorted)
        w = self.product.one_row(w)
        graph = self.graph(x, v, *self.product.edges(x, sender, receiver, num_out, order, is_sorted))
        if torch.is_grad_enabled() and (x.requires_grad or v.requires_grad or w.requires_grad):
            return _Forward.apply(x, v, w, graph, self)[0]
        return self.run_on(graph, forward(), (x, None, v, None, w, None, None, None))["g"]

    __call__ = forward

    def graph(self, x: Tensor, v: Tensor, *edges: Any) -> Graph:
        """A call's checked graph, with the product's shapes (y: the harmonics)."""
        if v.dim() != 2 or v.shape[1] != 3:
            raise InputError(f"v has shape {tuple(v.shape)}; expected one vector an edge, (num_edges, 3)")
        return self.product.graph(x, v, *edges)

    def run_on(self, graph: Graph, direction: Direction, operands: Operands, poison: bool = False) -> dict[str, Tensor]:
        """Run a direction of first derivatives, with v as operand y; gradients by slot, that of v as ``y``."""
        if direction.name not in self.inside:
            return self._run_apart(graph, direction, operands, poison)
        x, sender = operands[0], graph.sender
        assert x is not None
        key = (direction, None if sender is None else sender.dtype, x.get_device())
        of_vectors = graph._replace(shapes=graph.shapes | {"y": (graph.num_edges, 3)})
        runner = self._runners.get(key)
        if runner is None:
            tell_of_preparing()
            runner = self.product.prepared(direction, operands, of_vectors, self._runners, self.harmonics.problem)
        if WATCHERS:
            tell(self.product, direction, graph.num_edges, graph.num_out, sender, graph.receiver)
        return runner(operands, of_vectors, poison)

    def _run_apart(self, graph: Graph, direction: Direction, operands: Operands, poison: bool) -> dict[str, Tensor]:
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


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, w: Tensor, graph: Graph, both: HarmonicProduct) -> tuple:
        link = empty((0,), x)
        ctx.save_for_backward(x, v, w, link, *graph.saved)
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.both, ctx.operator, ctx.pending = graph, both, both.product, {}
        ctx.leaves = sole_leaves(x, v, w, graph, both.product)
        return both.run_on(graph, forward(), (x, None, v, None, w, None, None, None))["g"], link

    @staticmethod
    def backward(ctx: Any, g: Maybe, _: Maybe) -> tuple[Maybe, ...]:
        left, wanted = wanted_gradients(ctx)
        if not wanted or (g is None and not left):
            return (None,) * 5
        (x, v, w, link, *of_graph), both = ctx.saved_tensors, ctx.both
        graph = ctx.graph.of_saved(of_graph)
        differentiated = torch.is_grad_enabled() or is_transforming(g)
        if not differentiated and not left:
            found = both.run_on(graph, backward(wanted), (x, None, v, None, w, None, g, None))
            return (*(found.get(slot) for slot in "xyw"), None, None)
        y = both.harmonics(v)
        if differentiated:
            of_x, of_y, of_w = gradient_of_product(ctx, graph, (x, y, w), g, link, wanted)
        else:
            of_x, of_y, of_w = first_gradients(both.product, graph, (x, y, w), g, left, wanted)
        of_v = None if of_y is None else gradients(both.harmonics, inputs=(v,), g=of_y, rest=(), outputs="x")[0]
        return of_x, of_v, of_w, None, None
