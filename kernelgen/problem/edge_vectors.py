"""A product whose second input are spherical harmonics of edge vectors, as one problem.

A tuner stores a decision by it and a ``kernelgen.schedule.edge_vectors``; :mod:`kernelgen.ops.edge_vectors` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.errors import ProblemError
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem

SEPARATOR = ">"


@dataclass(frozen=True)
class VectorProblem:
    """A product whose second input are harmonics of vectors; ProblemError where they do not fit together."""

    product: TensorProductProblem
    harmonics: HarmonicsProblem

    def __post_init__(self) -> None:
        if self.harmonics.dim_out != self.product.dim_in2:
            raise ProblemError(
                f"harmonics of degrees {self.harmonics.degrees} have {self.harmonics.dim_out} components; the second "
                f"input {self.product.irreps_in2} has {self.product.dim_in2}"
            )

    @property
    def key(self) -> str:
        """Stable text, readable by :meth:`from_key`: the keys of both."""
        return f"{self.harmonics.key}{SEPARATOR}{self.product.key}"

    @classmethod
    def from_key(cls, key: str) -> VectorProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not one."""
        harmonics, separator, product = key.partition(SEPARATOR)
        if not separator:
            raise ProblemError(f"{key!r} is not a key of a product of vectors; expected 'sh|...{SEPARATOR}uvu|...'")
        return cls(TensorProductProblem.from_key(product), HarmonicsProblem.from_key(harmonics))
