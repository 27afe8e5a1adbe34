"""cuEquivariance as a peer, in its fastest form: one segmented polynomial with gather and sum inside.

The polynomial is the channelwise or the fully connected descriptor of ``cuequivariance.descriptors``, built from this
problem's paths and e3nn's coefficients, so weights and outputs keep e3nn's order and values. On a GPU a channelwise
polynomial is flattened and squeezed for the ``uniform_1d`` kernels (unequal multiplicities are split to their greatest
common divisor, as those kernels require); a fully connected one runs on the ``fused_tp`` kernels, cuEquivariance's own
choice. If kernels cannot be loaded, cuEquivariance silently computes naively: here that is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from autotune.compare.peers.peer import Adapter, Product, Task, needs
from autotune.errors import PeerError
from autotune.measure.kinds import Call
from kernelgen.compat import o3
from kernelgen.compile.compiler import cache_dir
from kernelgen.problem.product import TensorProductProblem

# Its kernels tune themselves during the first calls.
WARM_UP_CALLS = 60


def polynomial(problem: TensorProductProblem, *, flat: bool) -> Any:
    """The polynomial ``weights,x,y,out`` with the problem's paths, in its order.

    ``flat``: for a channelwise problem, scalar coefficients and one uniform mode, as ``uniform_1d`` requires.
    """
    import cuequivariance as cue

    connected = is_fully_connected(problem)
    product = cue.SegmentedTensorProduct.from_subscripts("uvw,iu,jv,kw+ijk" if connected else "uv,iu,jv,kuv+ijk")
    for path in problem.paths:
        product.add_segment(0, problem.muls(path) if connected else (path.mul, 1))
    for operand, blocks in ((1, problem.in1), (2, problem.in2)):
        for block in blocks:
            product.add_segment(operand, (block.dim, block.mul))
    for block in problem.out:
        product.add_segment(3, (block.dim, block.mul) if connected else (block.dim, block.mul, 1))
    for path in problem.paths:
        degrees = problem.in1[path.in1].l, problem.in2[path.in2].l, problem.out[path.out].l
        coupling = path.coefficient * o3.wigner_3j(*degrees, dtype=torch.float64)
        product.add_path(path.index, path.in1, path.in2, path.out, c=coupling.numpy())
    result = cue.SegmentedPolynomial.eval_last_operand(product)
    if connected:
        return result
    if not flat:
        return result.squeeze_modes("v")
    result = result.flatten_coefficient_modes().squeeze_modes()
    multiplicities = {block.mul for block in (*problem.in1, *problem.out)}
    if len(multiplicities) > 1:
        result = result.split_mode("u", math.gcd(*multiplicities))
    return result


def is_fully_connected(problem: TensorProductProblem) -> bool:
    """Whether all paths are of mode ``uvw``; PeerError if the problem is neither that nor channelwise."""
    connected = bool(problem.paths) and all(path.mode == "uvw" for path in problem.paths)
    if not connected and not problem.is_channelwise:
        raise PeerError("cuequivariance: only channelwise and fully connected products are compared with it")
    return connected


@functools.lru_cache(maxsize=2)
def module(problem: TensorProductProblem, method: str, dtype: str, device: torch.device) -> Any:
    """The polynomial as cuEquivariance's module; PeerError unless it runs by the requested method.

    It works for any graph, so the graphs of one problem share it.
    """
    import cuequivariance_torch as cuet

    keep_compiled()
    given = polynomial(problem, flat=method == "uniform_1d")
    # The other methods compute in the dtype of their inputs.
    options = {"math_dtype": getattr(torch, dtype)} if method == "fused_tp" else {}
    return by_method(method, lambda: cuet.SegmentedPolynomial(given, method=method, **options).to(device))


def keep_compiled() -> None:
    """Have its kernels kept beside ours, unless the user says where: it compiles large polynomials for minutes, in each
    process anew.
    """
    folder = cache_dir() / "cuequivariance"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("CUEQUIVARIANCE_OPS_NVRTC_CACHE_DIR", str(folder))


def by_method(method: str, make: Callable[[], Any], polynomial_of: Callable[[Any], Any] = lambda made: made) -> Any:
    """The module that ``make`` gives; PeerError unless its segmented polynomial runs by the requested method."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    inner = polynomial_of(made)
    ran_naively = "Naive" in type(inner.m).__name__
    if inner.method != method or ran_naively != (method == "naive"):
        said = "; ".join(str(warning.message) for warning in caught)
        raise PeerError(f"cuequivariance: asked for {method}, got {inner.method} ({type(inner.m).__name__}): {said}")
    return made


def convolution(task: Task, method: str) -> Call:
    """The module as a call on the task's graph."""
    work = task.workload
    made, shared = module(work.product, method, work.dtype, task.device), work.product.shared_weights
    inputs: dict[int, torch.Tensor] = {}
    shapes: dict[int, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    if task.is_conv:
        sender, receiver = task.edges
        inputs, outputs = {1: sender}, {0: receiver}
        shapes = {0: torch.empty(task.tensors.num_nodes, 1, device=task.device)}

    def call(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return made([w[None] if shared else w, x, y], inputs, shapes, outputs)[0]

    return call


def with_kernels(task: Task) -> Product:
    method = "fused_tp" if is_fully_connected(task.workload.product) else "uniform_1d"
    return Product(convolution(task, method), layout="ir_mul")


def naive(task: Task) -> Product:
    return Product(convolution(task, "naive"), layout="ir_mul")


no_module = needs("cuequivariance_torch", "install equitune[peers]")


def no_kernels(device: torch.device) -> str | None:
    reason = no_module(device)
    if reason:
        return reason
    if device.type != "cuda":
        return "its kernels need a CUDA device"
    try:
        import cuequivariance_ops_torch  # noqa: F401
    except ImportError as error:
        return (
            f"its kernels cannot be imported ({error}), so it would compute naively; install equitune[peers-gpu], "
            "or for CUDA 12 cuequivariance-ops-torch-cu12 with nvidia-ml-py and tqdm"
        )
    return None


ADAPTERS = (
    Adapter("cuequivariance", ("cuda",), no_kernels, with_kernels, WARM_UP_CALLS, module="cuequivariance_torch"),
    Adapter("cuequivariance-naive", ("cpu",), no_module, naive, module="cuequivariance_torch"),
)
# Of other kinds than products: how each computes.
METHODS = {"cuequivariance": "uniform_1d", "cuequivariance-naive": "naive"}


def adapters_of(operation: str, build: Callable[[str, Task], Product]) -> tuple[Adapter, ...]:
    """The same peers for another kind of kernel; ``build`` takes the method."""
    return tuple(
        dataclasses.replace(adapter, build=functools.partial(build, METHODS[adapter.name]), operations=(operation,))
        for adapter in ADAPTERS
    )
