"""What values and gradients by ``wgmma`` share: their operands, and products that run while lanes go on."""

from __future__ import annotations

from kernelgen.emit.radial.path_group import RadialGroup
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial import RadialPlan

# Where a warpgroup's hidden features are: as many parts of HIDDEN_ROWS halves before the matrix.
HIDDEN_OF = (
    "unsigned short* const {name} = slice - (1 + team.broadcast(threadIdx.x / 128, 0)) * ({parts} * HIDDEN_ROWS);"
)
HIDDEN = HIDDEN_OF.format(name="hidden", parts=1)


class ProductsInFlight(RadialGroup):
    """Groups of products end in the order in which they begin."""

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
