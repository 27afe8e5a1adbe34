"""The equivariance error of a kernel under a random rotation with inversion.

``f(D x)`` is compared with ``D f(x)``, both computed by the kernel; only the representation matrices ``D`` come from
e3nn. This error adds to the one against float64, which every kernel has to pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import torch

from autotune.workload.tensors import Tensors
from autotune.workload.workload import Workload
from kernelgen.compat import o3

# Operands by slot; tangents transform like their operands.
SLOTS = ("x", "y", "g")


def random_rotation(seed: int = 0) -> torch.Tensor:
    """A rotation with inversion, [3, 3] in float64, of determinant -1, so that parities are tested too."""
    generator = torch.Generator().manual_seed(seed)
    turned, upper = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    turned = turned * upper.diagonal().sign()
    return turned * -torch.linalg.det(turned).sign()


def turned(rows: torch.Tensor, irreps: str, layout: str, rotation: torch.Tensor) -> torch.Tensor:
    """Rows [n, dim] of irreps, transformed by ``rotation`` in float64 and returned in their own dtype."""
    parts = []
    for part, (mul, irrep) in zip(rows.split([m.dim for m in o3.Irreps(irreps)], -1), o3.Irreps(irreps), strict=True):
        matrix = _matrix(irrep.l, irrep.p, tuple(rotation.flatten().tolist())).to(rows.device)
        if layout == "mul_ir":
            made = part.double().view(len(rows), mul, irrep.dim) @ matrix.T
        else:
            made = matrix @ part.double().view(len(rows), irrep.dim, mul)
        parts.append(made.reshape(len(rows), -1).to(rows.dtype))
    return torch.cat(parts, -1) if parts else rows


@functools.lru_cache(maxsize=64)
def _matrix(degree: int, parity: int, elements: tuple[float, ...]) -> torch.Tensor:
    """``D`` of an irrep for a rotation with inversion, from ``Y(R v) = D Y(v)``; ``elements``: of the rotation's rows.

    e3nn's ``D_from_matrix`` uses generators in torch's default dtype, so it is accurate to float32 only.
    """
    rotation = torch.tensor(elements, dtype=torch.float64).view(3, 3)
    generator = torch.Generator().manual_seed(degree)
    points = torch.randn(4 * (2 * degree + 1), 3, generator=generator, dtype=torch.float64)
    here, there = (o3.spherical_harmonics(degree, v, True) for v in (points, points @ rotation.T))
    matrix = torch.linalg.lstsq(here, there).solution.T
    return matrix * (parity * (-1) ** degree)


def equivariance_error(
    workload: Workload,
    tensors: Tensors,
    run: Callable[[Tensors], Mapping[str, torch.Tensor]],
    seed: int = 0,
) -> float:
    """The largest relative error (Euclidean norm over all rows) of the outputs of ``run``, by slot.

    run: outputs (``x``, ``y``, ``w``, ``g``) for given tensors, of one direction.
    """
    irreps, rotation = workload.kind.irreps(workload.problem, workload.layout), random_rotation(seed)
    layouts = {"x": workload.layout, "y": "mul_ir", "g": workload.layout}

    def turn(slot: str, rows: torch.Tensor) -> torch.Tensor:
        return turned(rows, irreps[slot], layouts[slot], rotation) if slot in irreps else rows

    before = {slot: turn(slot, value.double()) for slot, value in run(tensors).items()}
    names = [name for slot in SLOTS if slot in irreps for name in (slot, "t" + slot) if getattr(tensors, name).numel()]
    changed = {name: turn(name[-1], getattr(tensors, name)) for name in names}
    after = run(dataclasses.replace(tensors, **changed))  # type: ignore[arg-type]
    worst = 0.0
    for slot, expected in before.items():
        size, difference = float(expected.norm()), float((after[slot].double() - expected).norm())
        worst = max(worst, difference / size if size else (torch.inf if difference else 0.0))
    return worst
