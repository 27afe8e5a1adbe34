"""OpenEquivariance as a peer, if installed: its fused convolution, with atomics and deterministic."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any

import numpy as np
import torch

from autotune.compare.peers.peer import Adapter, Product, Task
from autotune.errors import PeerError
from kernelgen.problem.product import TensorProductProblem


@functools.lru_cache(maxsize=4)
def module(problem: TensorProductProblem, operation: str, dtype: str, layout: str, deterministic: bool) -> Any:
    """Its ``TensorProductConv``, or ``TensorProduct`` for plain products; the graphs of one problem share it."""
    import openequivariance as oeq

    real = {"float32": np.float32, "float64": np.float64}[dtype]
    given = oeq.TPProblem(
        problem.irreps_in1,
        problem.irreps_in2,
        problem.irreps_out,
        problem.e3nn_instructions,
        shared_weights=problem.shared_weights,
        internal_weights=False,
        irrep_normalization=problem.irrep_normalization,
        path_normalization=problem.path_normalization,
        irrep_dtype=real,
        weight_dtype=real,
        layout=layout,
    )
    return (
        oeq.TensorProduct(given) if operation == "plain" else oeq.TensorProductConv(given, deterministic=deterministic)
    )


def build(task: Task, deterministic: bool) -> Product:
    """Its product on the task's graph, in the workload's layout; products of mode uvw have only one layout."""
    work = task.workload
    if deterministic and not task.is_conv:
        raise PeerError("openequivariance-deterministic: only convolutions have a deterministic form")
    layout = work.layout if work.product.is_channelwise else "mul_ir"
    made = module(work.product, work.operation, work.dtype, layout, deterministic)
    if not task.is_conv:
        return Product(made, layout, **_weight_orders(made))
    sender, receiver = task.edges
    # Edges are sorted by receiver, then sender; this permutation sorts them by sender, then receiver.
    transposed = torch.argsort(sender, stable=True) if deterministic else None

    def call(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return made(x, y, w, receiver, sender, transposed)

    return Product(call, layout, **_weight_orders(made))


def _order(sender: torch.Tensor, receiver: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Edges by receiver, then sender, and the permutation that sorts these by sender, then receiver."""
    by_sender = torch.argsort(sender, stable=True)
    both = by_sender[torch.argsort(receiver[by_sender], stable=True)]
    sender = sender[both]
    return sender, receiver[both], torch.argsort(sender, stable=True)


def _weight_orders(product: torch.nn.Module) -> dict[str, Any]:
    """Conversions from e3nn's weight order to the library's and back, by the library's functions."""
    return {"into": {"w": product.reorder_weights_from_e3nn}, "back": {"w": product.reorder_weights_to_e3nn}}


def no_module(device: torch.device) -> str | None:
    if importlib.util.find_spec("openequivariance") is None:
        return "not installed; pip install openequivariance"
    if device.type != "cuda":
        return "its kernels need a CUDA device"
    if device.index not in (None, 0):
        return "it always runs on cuda:0; name the GPU by CUDA_VISIBLE_DEVICES instead"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import openequivariance as oeq
    except Exception as error:  # its import runs assertions and may build an extension
        return f"cannot be imported ({type(error).__name__}: {error})"
    return None if oeq.BUILT_EXTENSION else f"its extension could not be built ({oeq.BUILT_EXTENSION_ERROR})"


ADAPTERS = tuple(
    Adapter(
        name, ("cuda",), no_module, functools.partial(build, deterministic=deterministic),
        listed_if_absent=False, module="openequivariance", deterministic=deterministic,
        order=_order if deterministic else None,
    )
    for name, deterministic in (("openequivariance", False), ("openequivariance-deterministic", True))
)  # fmt: skip
