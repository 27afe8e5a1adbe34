"""The problems of spherical harmonics, of a product with the harmonics of edge vectors, and of contractions."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.compat import o3
from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import Block, blocks_of, parse_irreps
from kernelgen.problem.product import TensorProductProblem

# The problem of spherical harmonics: degrees, normalization, and whether the vector is normalized first.

NORMALIZATIONS = ("integral", "component", "norm")
MAX_DEGREE = 12  # e3nn's


@dataclass(frozen=True)
class HarmonicsProblem:
    """The harmonics ``e3nn.o3.spherical_harmonics(degrees, v, normalize, normalization)``.

    degrees: l of each output block, each 0..12, in any order, repeats allowed. normalization: a block's length on the
    sphere is sqrt(2l+1) (``component``), 1 (``norm``) or sqrt((2l+1) / 4 pi) (``integral``). normalize: divide v by its
    length first. Raises ProblemError for any other value.
    """

    degrees: tuple[int, ...]
    normalization: str
    normalize: bool

    def __post_init__(self) -> None:
        degrees = tuple(self.degrees) if isinstance(self.degrees, tuple | list) else ()
        if not degrees or not all(type(degree) is int and 0 <= degree <= MAX_DEGREE for degree in degrees):
            raise ProblemError(
                f"degrees is {self.degrees!r}; expected one or more integers of 0..{MAX_DEGREE}, for example (0, 1, 2)"
            )
        object.__setattr__(self, "degrees", degrees)
        if self.normalization not in NORMALIZATIONS:
            raise ProblemError(f"normalization is {self.normalization!r}; choose one of {NORMALIZATIONS}")
        if not isinstance(self.normalize, bool):
            raise ProblemError(f"normalize is {self.normalize!r}; pass True (unit vectors) or False (raw vectors)")

    @property
    def dim_out(self) -> int:
        """Components of a row: the sum of 2l+1."""
        return sum(2 * degree + 1 for degree in self.degrees)

    @property
    def l_max(self) -> int:
        return max(self.degrees)

    @property
    def key(self) -> str:
        """Stable text such as ``sh|0,1,2|component|normalize`` (or ``|raw``), readable by :meth:`from_key`."""
        mode = "normalize" if self.normalize else "raw"
        return f"sh|{','.join(map(str, self.degrees))}|{self.normalization}|{mode}"

    @classmethod
    def from_key(cls, key: str) -> HarmonicsProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        parts = key.split("|")
        if len(parts) == 4 and all(degree.isdecimal() for degree in parts[1].split(",")):
            problem = cls(tuple(map(int, parts[1].split(","))), parts[2], parts[3] == "normalize")
            if problem.key == key:
                return problem
        raise ProblemError(
            f"{key!r} is not a key of harmonics; expected 'sh|0,1,2|normalization|normalize' or '...|raw'"
        )


# The problem of a product whose second input is the spherical harmonics of edge vectors.
#
# The tuner stores a ``kernelgen.kernels.spherical_harmonics`` for it; :mod:`kernelgen.ops.harmonics` runs it.

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


# The problem of MACE's symmetric contraction: polynomials in the components of one channel, weighted by element.


MOST_CORRELATION = 4


@dataclass(frozen=True)
class ContractionProblem:
    """The symmetric contraction of MACE (Batatia et al., NeurIPS 2022, equations 10 and 11), in a basis of its own.

    With x the components of one channel of one node, a row of the output is

        out[m] = sum over r of w[r] P_r[m](x)

    where the P_r, of degree 1 to ``correlation`` in x, are a basis of all polynomials that are equivariant with values
    in the irrep of the output (``kernelgen.arithmetic.contraction_couplings``). w [elements, weights, channels] has
    weights for each element and channel.

    irreps_in: each irrep of the features, for one channel, such as ``0e+1o+2e+3o``. irreps_out: the same of the output.
    Raises ProblemError for anything else.
    """

    irreps_in: str
    irreps_out: str
    correlation: int
    channels: int

    def __post_init__(self) -> None:
        for name in ("irreps_in", "irreps_out"):
            irreps = parse_irreps(getattr(self, name), name)
            if not irreps or any(mul != 1 for mul, _ in irreps):
                raise ProblemError(f"{name} is {str(irreps)!r}; expected irreps of one channel, for example '0e+1o+2e'")
            object.__setattr__(self, name, "+".join(str(ir) for _, ir in irreps))
        if type(self.correlation) is not int or not 1 <= self.correlation <= MOST_CORRELATION:
            raise ProblemError(f"correlation is {self.correlation!r}; expected an integer of 1..{MOST_CORRELATION}")
        if type(self.channels) is not int or self.channels < 1:
            raise ProblemError(f"channels is {self.channels!r}; expected a positive integer")

    @property
    def dim_in(self) -> int:
        """Components of a channel's features."""
        return sum(block.dim for block in blocks_of(self.irreps_in))

    @property
    def out(self) -> tuple[Block, ...]:
        """The output's irreps, each with its offset among the components of one channel."""
        return blocks_of(self.irreps_out)

    @property
    def dim_out(self) -> int:
        """Components of a channel's output."""
        return sum(block.dim for block in self.out)

    @property
    def key(self) -> str:
        """Stable text such as ``sc|0e+1o+2e+3o|0e+1o|3|128``, readable by :meth:`from_key`."""
        return f"sc|{self.irreps_in}|{self.irreps_out}|{self.correlation}|{self.channels}"

    @classmethod
    def from_key(cls, key: str) -> ContractionProblem:
        """Inverse of :attr:`key`; ProblemError if the text is not a key."""
        parts = key.split("|")
        if len(parts) == 5 and parts[3].isdecimal() and parts[4].isdecimal():
            problem = cls(parts[1], parts[2], int(parts[3]), int(parts[4]))
            if problem.key == key:
                return problem
        raise ProblemError(f"{key!r} is not a key of a contraction; expected 'sc|0e+1o|0e|correlation|channels'")
