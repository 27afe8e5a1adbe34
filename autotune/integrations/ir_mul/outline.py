"""How rows in ``ir_mul`` are divided: two irreps that are one row in ``mul_ir`` may be two in ``ir_mul``.

``64x1o+64x1o`` and ``128x1o`` have the same rows in ``mul_ir``. In ``ir_mul`` the channels of a block lie together for
each component, so the first has runs of 64 channels there and the second runs of 128. Scalars differ in neither.
"""

from __future__ import annotations

from kernelgen.compat import o3
from kernelgen.errors import UnsupportedError
from kernelgen.problem.irreps import Irreps


def outline(irreps: Irreps) -> tuple[tuple[int, int], ...]:
    """(degree, channels) of each run in a row; neighbouring scalars are one run."""
    found: list[tuple[int, int]] = []
    for mul, ir in o3.Irreps(str(irreps)):
        if ir.l == 0 and found and found[-1][0] == 0:
            found[-1] = (0, found[-1][1] + mul)
        elif mul:
            found.append((ir.l, mul))
    return tuple(found)


def check_same(found: Irreps, expected: Irreps, where: str) -> None:
    """UnsupportedError if rows of one are not rows of the other."""
    if outline(found) != outline(expected):
        raise UnsupportedError(f"{where} takes {expected}, and is given {found}: in layout ir_mul these differ")
