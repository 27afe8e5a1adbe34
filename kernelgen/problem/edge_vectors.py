"""The problem of a product whose second input is the spherical harmonics of edge vectors.

The tuner stores a ``kernelgen.schedule.edge_vectors`` for it; :mod:`kernelgen.ops.edge_vectors` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.errors import ProblemError
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem

SEPARATOR = ">"


@dataclass(frozen=True)
class VectorProblem:
    """A product and the harmonics of its second input; ProblemError if their dimensions differ."""

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
        """Stable text that contains the keys of both problems, readable by :meth:`from_key`."""
        return f"{self.harmonics.key}{SEPARATOR}{self.product.key}"

    @classmethod
    def from_key(cls, key: str) -> VectorProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        harmonics, separator, product = key.partition(SEPARATOR)
        if not separator:
            raise ProblemError(f"{key!r} is not a key of a product of vectors; expected 'sh|...{SEPARATOR}uvu|...'")
        return cls(TensorProductProblem.from_key(product), HarmonicsProblem.from_key(harmonics))
