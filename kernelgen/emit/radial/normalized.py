"""Edge values of a value's kernel: paths have a factor each, which their part of the matrix takes; lanes scale none."""

from __future__ import annotations

from kernelgen.emit.cuda.edge_operand import EdgeOperand
from kernelgen.emit.cuda.memory_access import Facts
from kernelgen.terms.clebsch_gordan import normalized_slots


class NormalizedOperand(EdgeOperand):
    """Edge values of one group. ``factors``: by path, what its staged values are to be multiplied by."""

    def __init__(self, kernel: Facts, paths: list[int], stride: int) -> None:
        super().__init__(kernel, paths, stride)
        self.staged_values, slots, self.factors = normalized_slots([kernel.terms[p] for p in paths])
        self.slots = {name: (slot, 1.0) for name, slot in slots.items()}
