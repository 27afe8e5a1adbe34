"""``wgmma`` instructions as C++ functions: one text for each width, the numbers of tiles of 8 columns.

Sums are arrays of a lane's registers, ``Real [tiles][4]``. Right operands are in shared memory, see
``include/warpgroup.cuh``: of weights, whose left operand is there as well, each column's halves are neighbours; of
gradients of hidden features, whose left operand is in registers, each row's.
"""

from __future__ import annotations

from collections.abc import Iterable


def warpgroup_calls(of_weights: Iterable[int], of_hidden: int) -> str:
    """The functions for some widths; of_hidden: 0 without gradients of hidden features."""
    widths = sorted(set(of_weights))
    lines = ["#ifdef __CUDA_ARCH__"]
    for tiles in widths:
        lines += _multiply(tiles, "const unsigned long long a", ['"l"(a)'], "0, 0")
    if of_hidden:
        operand = [f'"r"(a[{k}])' for k in range(4)]
        lines += _multiply(of_hidden, "const unsigned (&a)[4]", operand, "1")
    for tiles in sorted({*widths, *([of_hidden] if of_hidden else [])}):
        lines += _wait(tiles)
    return "\n".join([*lines, "#endif", ""])


def _sums(tiles: int, kind: str) -> str:
    return ", ".join(f'"{kind}"(d[{k // 4}][{k % 4}])' for k in range(4 * tiles))


def _multiply(tiles: int, left: str, operand: list[str], majors: str) -> list[str]:
    """``d += a b`` or ``d = a b``. majors: which operands in shared memory have rows of neighbours, not columns."""
    count = 4 * tiles
    sums = ", ".join(f"%{k}" for k in range(count))
    names = [f"%{count + k}" for k in range(len(operand))]
    a = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
    b = f"%{count + len(names)}"
    shape = f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.f16.f16"

    def statement(adds: int, kind: str) -> list[str]:
        return [
            f'asm volatile("{{.reg .pred adds; setp.ne.b32 adds, {adds}, 0; {shape} "',
            f'             "{{{sums}}}, {a}, {b}, adds, 1, 1, {majors};}}"',
            f"             : {_sums(tiles, kind)}",
            f'             : {", ".join(operand)}, "l"(b));',
        ]

    return [
        "template <bool ADDS>",
        f"DEVICE void multiply_async(Real (&d)[{tiles}][4], {left}, const unsigned long long b) {{",
        "    if (ADDS)",
        *("        " + line for line in statement(1, "+f")),
        "    else",
        *("        " + line for line in statement(0, "=f")),
        "}",
    ]


def _wait(tiles: int) -> list[str]:
    """Until all but the last LEFT groups of products are done; sums are there then."""
    return [
        "template <int LEFT>",
        f"DEVICE void wait_for(Real (&d)[{tiles}][4]) {{",
        f'    asm volatile("wgmma.wait_group.sync.aligned %{4 * tiles};"',
        f'                 : {_sums(tiles, "+f")} : "n"(LEFT));',
        "}",
    ]
