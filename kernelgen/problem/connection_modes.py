"""Instructions, and e3nn's connection modes as a table.

A path combines copy u of a first-input block with copy v of a second-input block. A :class:`Mode` says which (u, v)
form *pairs*, how pairs and weights make the copies of the output, and which multiplicities are allowed. Shapes and
order of the weights are those of ``e3nn.o3.TensorProduct`` 0.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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


def _any(mul1: int, mul2: int, mul3: int) -> bool:
    return True


MODES = {
    mode.name: mode
    for mode in (
        Mode("uvw", "all", "w", "", _any, needs_weight=True),
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
