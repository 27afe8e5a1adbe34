"""Parses irreps, in any spelling of e3nn, and lists their blocks with offsets in a feature row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kernelgen.e3nn_import import o3
from kernelgen.errors import ProblemError

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
