"""The problem of MACE's symmetric contraction: polynomials in the components of one channel, weighted by element."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.errors import ProblemError
from kernelgen.problem.irreps import Block, blocks_of, parse_irreps

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
