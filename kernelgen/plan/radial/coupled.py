"""Which paths of a radial convolution have coupled cotangents, and where these lie in shared memory.

For a path and a component i of x, ``H[i, j] = sum_k C[i, j, k] g[k]`` is formed once for a receiver's cotangents g. The
gradients of x, y and the weights are products of tensor cores with it; see ``emit/radial/coupled.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.plan.channelwise import Plan
from kernelgen.plan.path_groups import Group
from kernelgen.problem.radial_convolution import PRODUCTS
from kernelgen.schedule.radial import RadialSpec
from kernelgen.terms.clebsch_gordan import path_terms

# Components of a row of coupled cotangents: the columns of a tensor core's product.
COLUMNS = 8


@dataclass(frozen=True)
class CoupledPaths:
    """product: the plan of the convolution whose path arithmetic the kernel has, with teams of 16 channels."""

    spec: RadialSpec
    product: Plan

    def coupled(self, group: Group) -> tuple[int, ...]:
        """Paths of a group whose gradients tensor cores form: from so many terms for each component of x on."""
        least, terms, problem = self.spec.schedule.coupled, path_terms(self.spec.problem), self.spec.problem

        def is_coupled(p: int) -> bool:
            fits = problem.in2[problem.paths[p].in2].dim <= COLUMNS - 1
            return fits and len(terms[p].entries) >= least * terms[p].dim1

        return tuple(p for p in group.paths if least and is_coupled(p))

    def lane_paths(self, group: Group) -> tuple[int, ...]:
        """The other paths, whose gradients lanes compute from edge values."""
        coupled = self.coupled(group)
        return tuple(p for p in group.paths if p not in coupled)

    def lane_out(self, group: Group) -> tuple[int, ...]:
        """Blocks of cotangents of :meth:`lane_paths`."""
        used = {self.spec.problem.paths[p].out for p in self.lane_paths(group)}
        return tuple(b for b in group.out if b in used)

    def coupled_in2(self, group: Group) -> tuple[int, ...]:
        """Blocks of the second input that coupled paths have."""
        return tuple(sorted({self.spec.problem.paths[p].in2 for p in self.coupled(group)}))

    def first_rows(self, group: Group) -> dict[int, int]:
        """The row where coupled cotangents of each path begin, among those of 8 channels; one is before all.

        Paths with the most components of y are last: a load has 8 rows from a row on, or from the one before.
        """
        problem, rows, row = self.spec.problem, {}, 1
        for p in sorted(self.coupled(group), key=lambda p: problem.in2[problem.paths[p].in2].dim):
            rows[p] = row
            row += problem.in1[problem.paths[p].in1].dim * problem.in2[problem.paths[p].in2].dim
        return rows

    def coupled_rows(self, group: Group) -> int:
        """Rows in shared memory of coupled cotangents of 8 channels.

        Five more than a multiple of 8: so high and low parts that one load has lie in different banks.
        """
        problem, ends = self.spec.problem, [0]
        for p, row in self.first_rows(group).items():
            dim1, block = problem.in1[problem.paths[p].in1].dim, problem.in2[problem.paths[p].in2]
            ends += [row + dim1 * block.dim, row + (dim1 - 1) * block.dim - block.offset % 2 + COLUMNS]
        return max(ends) + (5 - max(ends)) % 8 if len(ends) > 1 else 0

    def coupled_reals(self, group: Group) -> int:
        """Elements in shared memory of a slice's coupled cotangents, each two halves or one."""
        return self.coupled_rows(group) * COLUMNS * (2 if PRODUCTS[self.spec.accuracy] > 1 else 1)
