"""``wgmma`` instructions as C++ functions, one for each width (a number of tiles of 8 columns), and waits for them.

Sums are arrays of a lane's registers, ``Real [tiles][4]``. Right operands are in shared memory, see
``include/warpgroup.cuh``: of weights, whose left operand is there as well, each column's halves are neighbours; of
gradients of hidden features, whose left operand is in registers, each row's.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernelgen.emit.radial.path_group import RadialGroup
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan

# Where a warpgroup's hidden features are: as many parts of HIDDEN_ROWS halves before the matrix.
HIDDEN_OF = (
    "unsigned short* const {name} = slice - (1 + team.broadcast(threadIdx.x / 128, 0)) * ({parts} * HIDDEN_ROWS);"
)
HIDDEN = HIDDEN_OF.format(name="hidden", parts=1)


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


class ProductsInFlight(RadialGroup):
    """What values and gradients share: their operands, and products that run while lanes go on.

    Groups of products end in the order in which they begin.
    """

    packs, leaves = "pack_blocks", "leave_blocks"
    shows_matrix = ("show_to_tensor_cores();", "__syncthreads();")

    def __init__(self, plan: RadialPlan, number: int, group: Group) -> None:
        super().__init__(plan, number, group)
        self.at_once = plan.spec.schedule.paths_at_once
        # Groups of products that nobody has waited for, in the order in which they begin.
        self.begun: list[str] = []

    @property
    def widths(self) -> set[int]:
        """Of weights formed at once, the numbers of tiles of 8 columns."""
        raise NotImplementedError

    def _wait_for(self, products: str, sums: str = "") -> None:
        """Wait for a group of products, in whose ``sums`` values are there then."""
        later = len(self.begun) - 1 - self.begun.index(products) if products in self.begun else len(self.begun)
        self.put(f"wait_for<{later}>({sums});" if sums else f"wait_for_products<{later}>();")
        self.begun = self.begun[len(self.begun) - later :]
