"""The problem of a product whose second input is the spherical harmonics of edge vectors.

The tuner stores a ``kernelgen.schedule.edge_vectors`` for it; :mod:`kernelgen.ops.edge_vectors` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.e3nn_import import o3
from kernelgen.errors import ProblemError
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.tensor_product import TensorProductProblem

SEPARATOR = ">"


@dataclass(frozen=True)
class VectorProblem:
    """A product and the harmonics of its second input; ProblemError if the product takes other irreps."""

    product: TensorProductProblem
    harmonics: HarmonicsProblem

    def __post_init__(self) -> None:
        if self.harmonics.dim_out != self.product.dim_in2:
            raise ProblemError(
                f"harmonics of degrees {self.harmonics.degrees} have {self.harmonics.dim_out} components; the second "
                f"input {self.product.irreps_in2} has {self.product.dim_in2}"
            )

        if not self._irreps_of_vectors():
            raise ProblemError(
                f"harmonics of degrees {self.harmonics.degrees} of vectors are even, or odd in odd degrees; the second "
                f"input is {self.product.irreps_in2}"
            )

    @property
    def irrep(self) -> str:
        """How the vectors transform: ``1o``, as differences of positions do, or ``1e`` if all harmonics are even.

        A product that takes harmonics of odd degrees as even is equivariant under an inversion that leaves the vectors
        as they are.
        """
        return self._irreps_of_vectors()[0]

    def _irreps_of_vectors(self) -> list[str]:
        given = [(ir.l, ir.p) for mul, ir in o3.Irreps(self.product.irreps_in2) for _ in range(mul)]
        parities = {"1o": -1, "1e": 1}
        return [
            vector
            for vector, parity in parities.items()
            if given == [(degree, parity**degree) for degree in self.harmonics.degrees]
        ]

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
