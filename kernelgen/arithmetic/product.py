"""The arithmetic of one path for one direction, as C++ statements that all emitters of channelwise products share.

These statements use fixed names, which the emitters declare:

    x1_0 tx1_0 g5_2 tg5_2  operands: buffer, block, component m     (channel scope: one value a channel)
    w3 tw3              weights of path 3                           (channel scope)
    m3_1 tm3_1          edge value 1 of path 3, from y or ty        (edge scope: one scalar an edge)
    ox1_0 og5_2 ow3     accumulators of the outputs x, g, w         (channel scope)
    r3_1                adjoint of edge value m3_1                  (channel scope, summed over channels)

Statements in channel scope work on a scalar (a channel of a CUDA thread) or on a vector of channels (host).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.arithmetic.couplings import PathTerms
from kernelgen.arithmetic.directions import Direction, Monomial


@dataclass(frozen=True)
class PathBody:
    """Statements in channel scope, with the names they read and add to (in order of first use)."""

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
        self.weighted: set[str] = set()

    def write(self) -> PathBody:
        live = self.direction.live_outputs
        for y in ("y", "ty"):
            monomials = [monomial for monomial in self.direction.monomials if monomial.y == y]
            if "g" in live:
                self._gradient_g(y, [monomial for monomial in monomials if monomial.g == "g"])
            for g in ("g", "tg"):
                of_g = [monomial for monomial in monomials if monomial.g == g]
                if "y" in live and y == "y" and of_g:
                    stem = "v" if g == "g" else "vg"
                    self._weighted_x(stem, of_g)
                    for entry in self.terms.entries:
                        sign = "-" if entry.sign < 0 else ""
                        product = f"{sign}{stem}{self.path.index}_{entry.m1} * {self._g(g, entry.m3)}"
                        self._add(f"r{self.path.index}_{entry.value}", product)
        if "x" in live or "w" in live:
            self._gradients_x_w(live)
        return PathBody(tuple(self.lines), tuple(self.read_names), tuple(self.accumulated))

    def _read(self, name: str) -> str:
        self.read_names[name] = None
        return name

    def _add(self, name: str, expression: str) -> None:
        self.accumulated[name] = None
        sign = "-" if expression.startswith("-") else "+"
        self.lines.append(f"{name} {sign}= {expression.lstrip('-')};")

    def _x(self, buffer: str, m1: int) -> str:
        return self._read(f"{buffer}{self.path.in1}_{m1}")

    def _g(self, buffer: str, m3: int) -> str:
        return self._read(f"{buffer}{self.path.out}_{m3}")

    def _w(self, buffer: str) -> str:
        return self._read(f"{buffer}{self.path.index}")

    def _m(self, y: str, value: int) -> str:
        return self._read(f"{'m' if y == 'y' else 'tm'}{self.path.index}_{value}")

    def _rows(self) -> list[int]:
        return sorted({entry.m1 for entry in self.terms.entries})

    def _weighted_x(self, stem: str, monomials: list[Monomial]) -> None:
        """``v3_1``: a component of x times the weight, summed over the monomials of one y and one g, computed once."""
        if stem in self.weighted:
            return
        self.weighted.add(stem)
        for m1 in self._rows():
            total = " + ".join(f"{self._w(monomial.w)} * {self._x(monomial.x, m1)}" for monomial in monomials)
            self.lines.append(f"const V {stem}{self.path.index}_{m1} = {total};")

    def _gradient_g(self, y: str, monomials: list[Monomial]) -> None:
        if not monomials:
            return
        stem = "v" if y == "y" else "vt"
        self._weighted_x(stem, monomials)
        for entry in self.terms.entries:
            sign = "-" if entry.sign < 0 else ""
            product = f"{sign}{self._m(y, entry.value)} * {stem}{self.path.index}_{entry.m1}"
            self._add(f"og{self.path.out}_{entry.m3}", product)

    def _gradients_x_w(self, live: str) -> None:
        """Monomials that share x and w share one ``t3_1``, the sum of their edge values times their rows of g."""
        together: dict[tuple[str, str], list[Monomial]] = {}
        for monomial in self.direction.monomials:
            if ("x" in live and monomial.x == "x") or ("w" in live and monomial.w == "w"):
                together.setdefault((monomial.x, monomial.w), []).append(monomial)
        # Rows of y and g that several (x, w) meet are contracted once: double backward has both tx and tw with (y, g).
        sums: dict[tuple[tuple[str, str], ...], list[tuple[str, str]]] = {}
        for pair, monomials in together.items():
            sums.setdefault(tuple((monomial.y, monomial.g) for monomial in monomials), []).append(pair)
        for number, (contracted, pairs) in enumerate(sums.items()):
            for m1 in self._rows():
                t = f"t{number or ''}{'_' if number else ''}{self.path.index}_{m1}"
                self.lines.append(f"const V {t} = {self._contraction(m1, contracted)};")
                for x, w in pairs:
                    if "x" in live and x == "x":
                        self._add(f"ox{self.path.in1}_{m1}", f"{self._w(w)} * {t}")
                    if "w" in live and w == "w":
                        self._add(f"ow{self.path.index}", f"{self._x(x, m1)} * {t}")

    def _contraction(self, m1: int, pairs: tuple[tuple[str, str], ...]) -> str:
        total = ""
        for y, g in pairs:
            for entry in self.terms.entries:
                if entry.m1 == m1:
                    sign = " - " if entry.sign < 0 else " + "
                    total += f"{sign}{self._m(y, entry.value)} * {self._g(g, entry.m3)}"
        return "-" + total[3:] if total.startswith(" - ") else total[3:]
