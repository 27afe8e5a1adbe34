"""The multilinear form of a product as data: nonzero Clebsch-Gordan terms and, for each path, C++ statements.

The form is

    F(x, y, w, g) = sum over p, u, m1, m2, m3 of C_p[m1,m2,m3] w[p,u] x[m1,u] y[m2] g[m3,u]

``C_p`` is the path's coefficient times e3nn's ``wigner_3j``. Since y does not depend on the channel u, the sums over
m2 are computed once an edge: ``M_p[m1,m3] = sum_m2 C_p y[m2]``. Entries of M that are equal up to sign share one *edge
value*.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kernelgen.arithmetic.directions import Direction, Monomial
from kernelgen.compat import wigner_3j
from kernelgen.problem.product import Path, TensorProductProblem

ZERO = 1e-12


@dataclass(frozen=True)
class EdgeValue:
    """A linear combination of components of one edge's y row: ``sum of coefficient * y[component]``."""

    terms: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Entry:
    """One nonzero of ``M_p``: ``M_p[m1, m3] = sign * values[value]``."""

    m1: int
    m3: int
    value: int
    sign: int


@dataclass(frozen=True)
class PathTerms:
    """One path with its edge values and the nonzero entries of its matrix ``M_p``."""

    path: Path
    dim1: int
    dim3: int
    values: tuple[EdgeValue, ...]
    entries: tuple[Entry, ...]


@functools.lru_cache(maxsize=256)
def path_terms(problem: TensorProductProblem) -> tuple[PathTerms, ...]:
    """The terms of every path, in instruction order."""
    return tuple(_terms_of(problem, path) for path in problem.paths)


@functools.lru_cache(maxsize=256)
def couplings_digest(problem: TensorProductProblem) -> str:
    """A text that differs if couplings of the problem do: e3nn 0.4 and 0.6 give some, as (1, 2, 2), opposite signs."""
    degrees = {(problem.in1[p.in1].l, problem.in2[p.in2].l, problem.out[p.out].l) for p in problem.paths}
    couplings = [wigner_3j(*each) for each in sorted(degrees)]
    # Those that must vanish are rounding errors.
    signs = [(value > 1e-6) - (value < -1e-6) for coupling in couplings for value in coupling.flatten().tolist()]
    return hashlib.sha256(repr(signs).encode()).hexdigest()[:16]


def _terms_of(problem: TensorProductProblem, path: Path) -> PathTerms:
    block1, block2, block3 = problem.in1[path.in1], problem.in2[path.in2], problem.out[path.out]
    coupling = path.coefficient * wigner_3j(block1.l, block2.l, block3.l)
    scale = float(coupling.abs().max()) or 1.0
    numbers: dict[tuple[tuple[int, float], ...], int] = {}
    values: list[EdgeValue] = []
    entries: list[Entry] = []
    for m1 in range(block1.dim):
        for m3 in range(block3.dim):
            column = coupling[m1, :, m3].tolist()
            terms = [(block2.offset + m2, c) for m2, c in enumerate(column) if abs(c) > ZERO * scale]
            if not terms:
                continue
            sign = 1 if terms[0][1] > 0 else -1
            terms = [(component, sign * c) for component, c in terms]
            rounded = tuple((component, round(c / scale, 10)) for component, c in terms)
            if rounded not in numbers:
                numbers[rounded] = len(values)
                values.append(EdgeValue(tuple(terms)))
            entries.append(Entry(m1, m3, numbers[rounded], sign))
    return PathTerms(path, block1.dim, block3.dim, tuple(values), tuple(entries))


def coupled_rows(terms: PathTerms, first: int, dim2: int) -> list[list[tuple[int, float]]]:
    """By component of x, then of y: terms (component of g, coefficient) of the sum over g alone.

    first, dim2: the path's components of a y row.
    """
    rows: list[list[tuple[int, float]]] = [[] for _ in range(terms.dim1 * dim2)]
    for entry in terms.entries:
        for component, coefficient in terms.values[entry.value].terms:
            rows[entry.m1 * dim2 + component - first].append((entry.m3, entry.sign * coefficient))
    return rows


def edge_slots(
    terms: Sequence[PathTerms], basis: bool
) -> tuple[tuple[EdgeValue, ...], dict[tuple[int, int], tuple[int, float]]]:
    """The edge values to store for some paths.

    Returns the stored values and, by (path, number of its value), a stored value's position and its factor. Without
    ``basis`` every value is stored as it is. With it, values that are multiples of each other are stored once, scaled
    so that the first coefficient is 1.
    """
    kept: list[EdgeValue] = []
    slots: dict[tuple[int, int], tuple[int, float]] = {}
    numbers: dict[tuple[tuple[int, float], ...], int] = {}
    for of_path in terms:
        for k, value in enumerate(of_path.values):
            scale = value.terms[0][1] if basis else 1.0
            scaled = tuple((component, c / scale) for component, c in value.terms)
            key = tuple((component, round(c, 9)) for component, c in scaled) if basis else ((len(kept), 0.0),)
            if key not in numbers:
                numbers[key] = len(kept)
                kept.append(EdgeValue(scaled))
            slots[of_path.path.index, k] = (numbers[key], scale)
    return tuple(kept), slots


def normalized_slots(
    terms: Sequence[PathTerms],
) -> tuple[tuple[EdgeValue, ...], dict[tuple[int, int], int], dict[int, float]]:
    """Edge values to store for some paths, each of which has one factor, so that few values serve all paths as stored.

    Returns the stored values, by (path, number of its value) the position of a stored value, and the paths' factors: a
    path's value is its factor times the stored one. Paths with few values choose first.
    """
    kept: dict[tuple[tuple[int, float], ...], tuple[int, EdgeValue]] = {}
    slots: dict[tuple[int, int], int] = {}
    factors: dict[int, float] = {}

    def key_of(value: EdgeValue, factor: float) -> tuple[tuple[int, float], ...]:
        return tuple((component, round(c / factor, 9)) for component, c in value.terms)

    for of_path in sorted(terms, key=lambda each: len(each.values)):
        starts = {tuple(component for component, _ in key): key[0][1] for key in kept}
        wanted = [abs(value.terms[0][1]) for value in of_path.values]
        for value, first in zip(of_path.values, list(wanted), strict=True):
            if (known := starts.get(tuple(component for component, _ in value.terms))) is not None:
                wanted.append(first / known)
        news = {factor: sum(key_of(value, factor) not in kept for value in of_path.values) for factor in wanted}
        factor = min(news, key=news.__getitem__)
        factors[of_path.path.index] = factor
        for k, value in enumerate(of_path.values):
            stored = EdgeValue(tuple((component, c / factor) for component, c in value.terms))
            slots[of_path.path.index, k] = kept.setdefault(key_of(value, factor), (len(kept), stored))[0]
    return tuple(value for _, value in kept.values()), slots, factors


# The arithmetic of one path for one direction, as C++ statements that all emitters of channelwise products share.
#
# These statements use fixed names, which the emitters declare:
#
#     x1_0 tx1_0 g5_2 tg5_2  operands: buffer, block, component m     (channel scope: one value a channel)
#     w3 tw3              weights of path 3                           (channel scope)
#     m3_1 tm3_1          edge value 1 of path 3, from y or ty        (edge scope: one scalar an edge)
#     ox1_0 og5_2 ow3     accumulators of the outputs x, g, w         (channel scope)
#     r3_1                adjoint of edge value m3_1                  (channel scope, summed over channels)
#
# Statements in channel scope work on a scalar (a channel of a CUDA thread) or on a vector of channels (host).


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
