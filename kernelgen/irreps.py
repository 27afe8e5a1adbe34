"""Irreps as rows of features: any spelling of e3nn enters, blocks with their offsets leave."""

from __future__ import annotations

from dataclasses import dataclass

from e3nn import o3

from kernelgen.errors import ProblemError


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


def parse_irreps(text: str | o3.Irreps, what: str) -> o3.Irreps:
    """``o3.Irreps`` of any spelling e3nn accepts; ProblemError names the operand (``what``) otherwise."""
    try:
        irreps = o3.Irreps(text)
    except (ValueError, TypeError, AssertionError) as error:
        raise ProblemError(
            f"{what}: {text!r} is not an irreps string; expected for example '128x0e+128x1o' (mul x degree parity)"
        ) from error
    return irreps


def blocks_of(irreps: str) -> tuple[Block, ...]:
    """The blocks of an irreps with their offsets in a feature row."""
    blocks, offset = [], 0
    for mul, ir in o3.Irreps(irreps):
        blocks.append(Block(offset, mul, ir.l, f"{mul}x{ir}"))
        offset += mul * ir.dim
    return tuple(blocks)
