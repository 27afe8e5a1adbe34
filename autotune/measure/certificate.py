"""The certificate of a kernel: what is known of its values besides their errors, measured on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.measure.equivariance import equivariance_error
from autotune.measure.reference.tensor_product import Reference
from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload


def certify(
    workload: Workload,
    direction: str,
    tensors: Tensors,
    reference: Reference,
    run: Callable[[Tensors], Mapping[str, torch.Tensor]],
) -> tuple[dict[str, float], dict[str, Any]]:
    """Errors against float64 by slot, from two runs, and the certificate of a direction.

    run: outputs by slot for given tensors. ``bitwise``: whether both runs gave the same bits. ``equivariance``:
    relative error under a rotation with inversion. ``edges``: number of edges checked for errors.
    """
    first = run(tensors)
    errors = reference.check(direction, first)
    second = run(tensors)
    for slot, error in reference.check(direction, second).items():
        errors[slot] = max(error, errors[slot])
    bitwise = all(torch.equal(first[slot], second[slot]) for slot in first)
    del first, second
    equivariance = equivariance_error(workload, tensors, run)
    return errors, {"bitwise": bitwise, "equivariance": equivariance, "edges": reference.checked_edges}
