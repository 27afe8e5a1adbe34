"""What convolutions with weights formed in registers are compared with: torch's product, and our own convolution.

``product-ieee`` and ``product-tf32`` form all weights in memory, with torch's product in float32 or TF32,
``product-fp16x3`` with ours in float32's accuracy; ``streamed`` forms them by parts of the edges, with ours too. The
convolution has the schedules known for it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autotune.compare.peers.peer import Adapter, Product, Task
from autotune.database.lookup import find_schedule
from autotune.measure.operations import order_of
from autotune.measure.references import radial_problem
from autotune.workload.kinds.radial_convolution import RadialKind
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.ops.product import Operator, build
from kernelgen.ops.radial_convolution import radial_product

# Bytes of the weights that exist at a time when they are streamed.
PART_BYTES = 256 << 20


def _operator(task: Task) -> Operator:
    """The convolution with weights in memory, with the schedules known for the workload's graph."""
    work, product = task.workload, radial_problem(task.workload).product
    where = GraphClass.of("conv", task.tensors.num_edges, task.tensors.num_nodes)
    kernel = (work.dtype, work.layout, device_facts(task.device), where, False)
    known: dict[str, Any] = {name: find_schedule(product, "conv", name, *kernel).schedule for name in DIRECTIONS}
    dtype: Any = getattr(torch, work.dtype)
    return build(product, known, operation="conv", dtype=dtype, layout=work.layout, device=task.device)


def _whole(allow_tf32: bool, task: Task) -> Product:
    operator, order = _operator(task), order_of(task.tensors)
    edges, nodes, matrix = task.edges, task.tensors.num_nodes, task.tensors.tw

    def call(x: torch.Tensor, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        weights = _Multiply.apply(h, matrix, allow_tf32)
        return operator(x, y, weights, *edges, num_out=nodes, order=order)

    return Product(call, task.workload.layout)


def _by_parts(part_bytes: int, task: Task) -> Product:
    problem, operator, tensors = radial_problem(task.workload), _operator(task), task.tensors
    most = max(1, part_bytes // (problem.product.weight_numel * tensors.w.element_size()))
    rest = (tensors.tw, *task.edges, tensors.num_nodes, operator, most)
    return Product(lambda x, y, h: radial_product(x, y, h, *rest), task.workload.layout)


class _Multiply(torch.autograd.Function):
    """``h @ matrix``, and the gradient of h, with or without TF32."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, matrix: torch.Tensor, allow_tf32: bool) -> torch.Tensor:
        ctx.matrix, ctx.allow_tf32 = matrix, allow_tf32
        with _tf32(allow_tf32):
            return h @ matrix

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with _tf32(ctx.allow_tf32):
            return gradients[0] @ ctx.matrix.t(), None, None


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_HOW: dict[str, Any] = {"module": "torch", "operations": RadialKind.operations}
ADAPTERS = (
    Adapter("product-ieee", ("cpu", "cuda"), lambda _: None, functools.partial(_whole, False), **_HOW),
    Adapter("product-tf32", ("cuda",), lambda _: None, functools.partial(_whole, True), **_HOW),
    Adapter("product-fp16x3", ("cuda",), lambda _: None, functools.partial(_by_parts, sys.maxsize), **_HOW),
    Adapter("streamed", ("cpu", "cuda"), lambda _: None, functools.partial(_by_parts, PART_BYTES), **_HOW),
)
