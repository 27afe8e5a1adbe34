"""Irreps in any spelling of e3nn, as blocks with offsets in a feature row; and how blocks are connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kernelgen.compat import o3
from kernelgen.errors import ProblemError

# Parses irreps, in any spelling of e3nn, and lists their blocks with offsets in a feature row.

# Limits far above any network's needs, and low enough for tables of coefficients.
MOST_FEATURES, MOST_DEGREE = 2**24, 32
# Of a user: any spelling of e3nn.
Irreps: TypeAlias = "str | o3.Irreps"


@dataclass(frozen=True)
class Block:
    """One ``mul x ir`` block of an irreps: its offset in the feature row, multiplicity and degree."""

    offset: int
    mul: int
    l: int  # noqa: E741  (the field's name for the degree)
    text: str

    @property
    def dim(self) -> int:
        return 2 * self.l + 1


def parse_irreps(text: Irreps, what: str) -> o3.Irreps:
    """``o3.Irreps`` of any spelling e3nn accepts; otherwise ProblemError, which names the operand ``what``."""
    try:
        irreps = o3.Irreps(text)
    except (ValueError, TypeError, AssertionError) as error:
        raise ProblemError(
            f"{what}: {text!r} is not an irreps string; expected for example '128x0e+128x1o' (mul x degree parity)"
        ) from error
    # ``irreps.dim`` and ``irreps.lmax`` fail for empty irreps.
    features, degree = sum(mul * (2 * ir.l + 1) for mul, ir in irreps), max((ir.l for _, ir in irreps), default=0)
    if features > MOST_FEATURES or degree > MOST_DEGREE:
        shown = str(text) if len(str(text)) <= 100 else f"{str(text)[:100]}..."
        raise ProblemError(
            f"{what}: {shown!r} has {_count(features)} features a row and degree {_count(degree)}; expected at most "
            f"{MOST_FEATURES} features and degree {MOST_DEGREE}"
        )
    return irreps


def _count(number: int) -> str:
    """A short text of a number of any size: Python refuses to print thousands of digits."""
    return str(number) if number < 10**18 else "more than 10^18"


def blocks_of(irreps: str) -> tuple[Block, ...]:
    """The blocks of an irreps with their offsets in a feature row."""
    blocks, offset = [], 0
    for mul, ir in o3.Irreps(irreps):
        blocks.append(Block(offset, mul, ir.l, f"{mul}x{ir}"))
        offset += mul * ir.dim
    return tuple(blocks)


# Instructions, and e3nn's connection modes as a table.
#
# A path combines copy u of a first-input block with copy v of a second-input block. A :class:`Mode` says which (u, v)
# form *pairs*, how pairs and weights make the copies of the output, and which multiplicities are allowed. Shapes and
# order of the weights are those of ``e3nn.o3.TensorProduct`` 0.6.


@dataclass(frozen=True)
class Instruction:
    """One path as the user gives it: block indices into the three irreps, ``path_weight`` and mode as in e3nn."""

    in1: int
    in2: int
    out: int
    path_weight: float = 1.0
    mode: str = "uvu"
    has_weight: bool = True

    @property
    def text(self) -> str:
        """``0.1.2`` for a weighted uvu path; ``0.1.2:uvuv-*0.5`` for mode uvuv, no weights (-), path weight 0.5."""
        mode = "" if self.mode == "uvu" and self.has_weight else f":{self.mode}" + ("" if self.has_weight else "-")
        factor = "" if self.path_weight == 1.0 else f"*{self.path_weight!r}"
        return f"{self.in1}.{self.in2}.{self.out}{mode}{factor}"

    @classmethod
    def from_text(cls, text: str) -> Instruction:
        """Inverse of :attr:`text`; ValueError if it is not one."""
        rest, _, weight = text.partition("*")
        blocks, _, mode = rest.partition(":")
        in1, in2, out = (int(number) for number in blocks.split("."))
        return cls(in1, in2, out, float(weight or 1.0), mode.removesuffix("-") or "uvu", not mode.endswith("-"))


@dataclass(frozen=True)
class Mode:
    """One connection mode.

    pairs: ``all`` (u, v), pair number u * mul2 + v; ``same`` (u = v); ``upper`` (u < v, row by row).
    result: what a copy of the output sums: ``w``, every pair times its weight for that copy; ``u`` or ``v``, the pairs
        of that copy of the first or second input; ``pair``, one pair.
    rule, fits: the condition on the multiplicities (mul1, mul2, mul3), as text and as a function.
    needs_weight: a path must have weights.
    """

    name: str
    pairs: str
    result: str
    rule: str
    fits: Callable[[int, int, int], bool]
    needs_weight: bool = False

    def count(self, mul1: int, mul2: int) -> int:
        """Number of pairs of a path."""
        return {"all": mul1 * mul2, "same": mul1, "upper": mul1 * (mul1 - 1) // 2}[self.pairs]

    def shape(self, mul1: int, mul2: int, mul3: int) -> tuple[int, ...]:
        """Shape of a path's weights, row-major."""
        pairs = (mul1, mul2) if self.pairs == "all" else (self.count(mul1, mul2),)
        return (*pairs, mul3) if self.result == "w" else pairs


MODES = {
    mode.name: mode
    for mode in (
        Mode("uvw", "all", "w", "", lambda a, b, c: True, needs_weight=True),
        Mode("uvu", "all", "u", "mul_in1 = mul_out", lambda a, b, c: a == c),
        Mode("uvv", "all", "v", "mul_in2 = mul_out", lambda a, b, c: b == c),
        Mode("uuw", "same", "w", "mul_in1 = mul_in2", lambda a, b, c: a == b),
        Mode("uuu", "same", "pair", "mul_in1 = mul_in2 = mul_out", lambda a, b, c: a == b == c),
        Mode("uvuv", "all", "pair", "mul_in1 * mul_in2 = mul_out", lambda a, b, c: a * b == c),
        Mode(
            "uvu<v",
            "upper",
            "pair",
            "mul_in1 = mul_in2 and mul_in1 * (mul_in1 - 1) / 2 = mul_out",
            lambda a, b, c: a == b and a * (a - 1) // 2 == c,
        ),
        Mode("u<vw", "upper", "w", "mul_in1 = mul_in2", lambda a, b, c: a == b, needs_weight=True),
    )
}
