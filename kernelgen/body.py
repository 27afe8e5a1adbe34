"""The arithmetic of one path for one direction, as C++ statements that both emitters share.

Names are fixed here and declared by the emitters:

    x1_0 tx1_0 g5_2     operands: buffer, block, component m        (channel scope: one value a channel)
    w3 tw3              weights of path 3                           (channel scope)
    m3_1 tm3_1          edge value 1 of path 3, from y or ty        (edge scope: one scalar an edge)
    ox1_0 og5_2 ow3     accumulators of the outputs x, g, w         (channel scope)
    r3_1                adjoint of edge value m3_1                  (channel scope, summed over channels)

Channel statements are valid for a scalar (one CUDA thread's channel) and for a vector of channels (host).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.direction import Direction, Monomial
from kernelgen.terms import PathTerms


@dataclass(frozen=True)
class PathBody:
    """Statements in channel scope, with the names they read and accumulate into (in order of first use)."""

    statements: tuple[str, ...]
    reads: tuple[str, ...]
    accumulates: tuple[str, ...]


def path_body(terms: PathTerms, direction: Direction) -> PathBody:
    """Everything that one path adds to the direction's live outputs, for one channel."""
    return _Writer(terms, direction).write()


class _Writer:
    def __init__(self, terms: PathTerms, direction: Direction) -> None:
        self.terms, self.direction = terms, direction
        self.path = terms.path
        self.lines: list[str] = []
        self.read_names: dict[str, None] = {}
        self.accumulated: dict[str, None] = {}

    def write(self) -> PathBody:
        live = self.direction.live_outputs
        for y in ("y", "ty"):
            monomials = [monomial for monomial in self.direction.monomials if monomial.y == y]
            if not monomials:
                continue
            wants_y = "y" in live and y == "y"
            if "g" in live or wants_y:
                self._weighted_x(y, monomials)
            if "g" in live:
                self._gradient_g(y)
            if wants_y:
                self._adjoint_values(y)
            if any(self._wants(monomial, live) for monomial in monomials):
                self._gradient_x_w(y, monomials, live)
        return PathBody(tuple(self.lines), tuple(self.read_names), tuple(self.accumulated))

    @staticmethod
    def _wants(monomial: Monomial, live: str) -> bool:
        return ("x" in live and monomial.x == "x") or ("w" in live and monomial.w == "w")

    def _read(self, name: str) -> str:
        self.read_names[name] = None
        return name

    def _add(self, name: str, expression: str) -> None:
        self.accumulated[name] = None
        sign = "-" if expression.startswith("-") else "+"
        self.lines.append(f"{name} {sign}= {expression.lstrip('-')};")

    def _x(self, buffer: str, m1: int) -> str:
        return self._read(f"{buffer}{self.path.in1}_{m1}")

    def _g(self, m3: int) -> str:
        return self._read(f"g{self.path.out}_{m3}")

    def _w(self, buffer: str) -> str:
        return self._read(f"{buffer}{self.path.index}")

    def _m(self, y: str, value: int) -> str:
        return self._read(f"{'m' if y == 'y' else 'tm'}{self.path.index}_{value}")

    def _local(self, stem: str, y: str, m: int) -> str:
        """A temporary of this path: v3_1 from y, vt3_1 from ty."""
        return f"{stem}{'' if y == 'y' else 't'}{self.path.index}_{m}"

    def _rows(self) -> list[int]:
        return sorted({entry.m1 for entry in self.terms.entries})

    def _weighted_x(self, y: str, monomials: list[Monomial]) -> None:
        for m1 in self._rows():
            total = " + ".join(f"{self._w(monomial.w)} * {self._x(monomial.x, m1)}" for monomial in monomials)
            self.lines.append(f"const V {self._local('v', y, m1)} = {total};")

    def _gradient_g(self, y: str) -> None:
        for entry in self.terms.entries:
            sign = "-" if entry.sign < 0 else ""
            product = f"{sign}{self._m(y, entry.value)} * {self._local('v', y, entry.m1)}"
            self._add(f"og{self.path.out}_{entry.m3}", product)

    def _adjoint_values(self, y: str) -> None:
        for entry in self.terms.entries:
            sign = "-" if entry.sign < 0 else ""
            product = f"{sign}{self._local('v', y, entry.m1)} * {self._g(entry.m3)}"
            self._add(f"r{self.path.index}_{entry.value}", product)

    def _gradient_x_w(self, y: str, monomials: list[Monomial], live: str) -> None:
        for m1 in self._rows():
            total = ""
            for entry in self.terms.entries:
                if entry.m1 == m1:
                    sign = " - " if entry.sign < 0 else " + "
                    total += f"{sign}{self._m(y, entry.value)} * {self._g(entry.m3)}"
            t = self._local("t", y, m1)
            total = "-" + total[3:] if total.startswith(" - ") else total[3:]
            self.lines.append(f"const V {t} = {total};")
            for monomial in monomials:
                if "x" in live and monomial.x == "x":
                    self._add(f"ox{self.path.in1}_{m1}", f"{self._w(monomial.w)} * {t}")
                if "w" in live and monomial.w == "w":
                    self._add(f"ow{self.path.index}", f"{self._x(monomial.x, m1)} * {t}")
