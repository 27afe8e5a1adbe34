"""Real spherical harmonics as scalar C++ statements: values, first and second derivatives, in e3nn's convention.

With the polar component p = v[1], and a = v[2], b = v[0] in the plane perpendicular to it, the harmonics of degree l
and order +m, -m (e3nn lists -l..l) are

    N Q_lm(p, r^2) C_m(a, b),  N Q_lm(p, r^2) S_m(a, b),    C_m + i S_m = (a + i b)^m / s_m,    r^2 = p^2 + a^2 + b^2

with the profile Q_lm(p, r^2) = r^(l-m) (d/dt)^m P_l(t) at t = p/r, as in Bigi, Fraux, Browning and Ceriotti, J. Chem.
Phys. 159, 064802 (2023). Derivatives are multiples of the same functions:

    plane         dC_m = C_(m-1) da - S_(m-1) db,  dS_m = S_(m-1) da + C_(m-1) db       if s_m = m!
    raw vectors   dQ_lm = (l+m) Q_(l-1)m dp - Q_(l-1)(m+1) dz,                          z = (a^2 + b^2) / 2
    unit vectors  dQ_lm = Q_l(m+1) dp                                                   if r^2 is replaced by 1

Replacing r^2 by 1 changes values off the sphere only, which do not affect the gradient with respect to v = |v| u.
Values use s_m = 1. A profile has a closed form near m = l; else it follows from the next two orders (the m-th
derivative of Legendre's equation): (l-m)(l+m+1) Q_lm = 2(m+1) p Q_l(m+1) - (a^2+b^2) Q_l(m+2). Gradients first sum
cotangents times profiles over l, then multiply by the plane once for each m. Names that the caller declares:

    vx0 vx1 vx2   the vector, in e3nn's order
    tx0 tx1 tx2   tangent of the first gradient (double_backward)
    g_5           component 5 of the harmonics' row: assigned by forward, its cotangent elsewhere
    ox0 ox1 ox2   gradient with respect to the vector: added to
    og_5          gradient with respect to g_5 (double_backward): assigned

All other names are local, so the statements need their own scope. ``Real`` is float or double, and ``sqrt`` must be
overloaded for it (CUDA, or <math.h> in C++).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kernelgen.errors import ProblemError
from kernelgen.problem.other_kinds import HarmonicsProblem

# Scalar C++ statements as data, without those that no output needs.
#
# A *term* is a coefficient times a product of names. The writer of a body adds constants, assigned outputs and sums to
# :class:`Statements` in the order of the text. Equal products are merged; factors of 1 and terms of 0 are omitted.
# Numbers are written as ``Real(...)``, so the text serves float and double.


@dataclass(frozen=True)
class Body:
    """Statements in order, and the caller's names that they read, assign and add to."""

    statements: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    accumulates: tuple[str, ...]


@dataclass(frozen=True)
class Term:
    """A coefficient times the product of some names."""

    coefficient: float
    names: tuple[str, ...] = ()

    def __mul__(self, other: Term | float) -> Term:
        factor = other if isinstance(other, Term) else Term(other)
        return Term(self.coefficient * factor.coefficient, self.names + factor.names)

    def __neg__(self) -> Term:
        return self * -1.0


ZERO, ONE = Term(0.0), Term(1.0)


def named(name: str) -> Term:
    """The term of a single name."""
    return Term(1.0, (name,))


def merged(terms: Iterable[Term]) -> list[Term]:
    """The terms with equal products merged, zeros dropped, positive terms first."""
    products: dict[tuple[str, ...], list[Term]] = {}
    for term in terms:
        products.setdefault(tuple(sorted(term.names)), []).append(term)
    sums = [Term(sum(term.coefficient for term in same), same[0].names) for same in products.values()]
    return sorted((term for term in sums if term.coefficient), key=lambda term: term.coefficient < 0)


def expression(terms: Sequence[Term]) -> str:
    """The sum of terms as C++, such as ``Real(0.5) * x - y``; a leading sign is part of its number if there is one."""
    text = ""
    for term in terms:
        size = term.coefficient if not text else abs(term.coefficient)
        number = [f"Real({size!r})"] if abs(size) != 1 or not term.names else []
        sign = (" - " if term.coefficient < 0 else " + ") if text else "-" if size == -1 and term.names else ""
        text += sign + " * ".join([*number, *term.names])
    return text


# A statement: the name that it sets or adds to, the names that it uses, and its text.
Line = tuple[str, tuple[str, ...], str]


def needed(lines: Sequence[Line], is_output: Callable[[str], object]) -> list[Line]:
    """The statements that outputs depend on, in order."""
    names: set[str] = set()
    kept: list[Line] = []
    for line in reversed(lines):
        if line[0] in names or is_output(line[0]):
            names.update(line[1])
            kept.append(line)
    return kept[::-1]


class Statements:
    """Collects statements, each with the name it sets and the names it uses; :meth:`body` drops unused ones.

    assigned, added: prefixes of the names of outputs that are assigned, and of outputs that are added to.
    """

    def __init__(self, assigned: tuple[str, ...], added: tuple[str, ...]) -> None:
        self.assigned, self.added = assigned, added
        self.lines: list[Line] = []
        self.known: dict[str, Term] = {}

    def line(self, name: str, terms: Iterable[Term], text: str) -> None:
        self.lines.append((name, tuple(used for term in terms for used in term.names), text))

    def let(self, name: str, terms: Iterable[Term], outer: Term = ONE, guard: bool = False) -> Term:
        """The constant ``outer * sum of terms``; a single name needs no statement. guard: 0 if ``zero`` is true."""
        if name not in self.known:
            terms = merged(terms)
            if len(terms) < 2:
                terms, outer = [outer * term for term in terms] or [ZERO], ONE
            if len(terms) == 1 and (not terms[0].names or terms[0] == named(terms[0].names[0])):
                self.known[name] = terms[0]
            else:
                self.known[name] = named(name)
                text = expression(terms) if outer == ONE else f"{expression([outer])} * ({expression(terms)})"
                text = f"zero ? Real(0) : {text}" if guard else text
                self.line(name, [outer, *terms, *[named("zero")] * guard], f"const Real {name} = {text};")
        return self.known[name]

    def put(self, name: str, terms: Iterable[Term]) -> None:
        """Assign an output."""
        kept = merged(terms) or [ZERO]
        self.line(name, kept, f"{name} = {expression(kept)};")

    def add(self, name: str, terms: Iterable[Term]) -> None:
        """Add each term by its own statement, one fused multiply-add; the first one declares a name not an output's."""
        for term in merged(terms):
            minus = term.coefficient < 0
            if name.startswith(self.added) or name in self.known:
                self.line(name, [term], f"{name} {'-' if minus else '+'}= {expression([-term if minus else term])};")
            else:
                self.known[name] = named(name)
                self.line(name, [term], f"Real {name} = {expression([term])};")

    def body(self) -> Body:
        """The statements that outputs depend on, and the names that the caller must declare."""
        kept = needed(self.lines, lambda name: name.startswith(self.assigned + self.added))
        names = dict.fromkeys(name for name, _, _ in kept)
        reads = dict.fromkeys(name for _, used, _ in kept for name in used if name not in names)
        writes = tuple(name for name in names if name.startswith(self.assigned))
        added = tuple(name for name in names if name.startswith(self.added))
        return Body(tuple(text for _, _, text in kept), tuple(reads), writes, added)


DIRECTIONS = ("forward", "backward", "double_backward")
# Shorter vectors count as zero vectors; torch.nn.functional.normalize divides by max(|v|, EPS).
EPS = 1e-12
# Up to this degree in p, closed forms cost no more than the recursion and are as accurate.
CLOSED = 4


def harmonics_body(problem: HarmonicsProblem, direction: str, outputs: Iterable[str] = ("x", "g")) -> Body:
    """The statements for one vector v, with Y its harmonics, g their cotangents and t the tangent:

        forward           g_i = Y_i                                           [dim_out]
        backward          ox += grad sum_i g_i Y_i                            [3]
        double_backward   ox += Hessian(sum_i g_i Y_i) t,  og_i = t . grad Y_i       [3] and [dim_out]

    ``outputs`` selects those of double_backward: ``x``, ``g`` or both. Inputs that no output needs are not read; an ox
    with nothing to add is not written. With ``normalize``, a vector shorter than 1e-12 counts as the zero vector and
    gives what e3nn and torch give for it: values are 0 except for degree 0; the gradient (and so og) has the part of
    degree 1 alone, 1e12 times its constant; ox of double_backward is 0 (nan in torch). A nan in v stays nan.

    Raises ProblemError for an unknown direction or output.
    """
    wanted = frozenset(outputs)
    if direction not in DIRECTIONS:
        raise ProblemError(f"direction is {direction!r}; choose one of {DIRECTIONS}")
    if not wanted or not wanted <= {"x", "g"}:
        raise ProblemError(f"outputs are {sorted(wanted)}; choose 'x', 'g' or both")
    writer = _Writer(problem, direction)
    for m in range(problem.l_max + 1):
        if direction == "forward":
            writer.components("g", m, writer.values)
        if direction == "double_backward" and "g" in wanted:
            writer.components("og", m, writer.tangents)
        if direction == "backward" or (direction == "double_backward" and "x" in wanted):
            writer.gradient(m)
    writer.finish()
    return writer.text.body()


# How often a profile is differentiated by p and by z; and its factors for +m and -m as a function of m.
_Plane = tuple[tuple[int, int], Callable[[int], tuple[Term, Term]]]


class _Writer:
    """Writes each output as a sum over orders, signs and degrees of (cotangent) x (derivative of) profile x plane."""

    def __init__(self, problem: HarmonicsProblem, direction: str) -> None:
        self.normalization, self.unit, self.direction = problem.normalization, problem.normalize, direction
        self.text = Statements(assigned=("g_", "og_"), added=("ox",))
        self.centres: dict[int, list[int]] = {}  # by degree: positions of m = 0 in a row
        offset = 0
        for degree in problem.degrees:
            self.centres.setdefault(degree, []).append(offset + degree)
            offset += 2 * degree + 1
        self.values: list[_Plane] = [((0, 0), self.circle)]
        self.tangents: list[_Plane] = [((0, 0), self.turned), ((1, 0), lambda m: self.scaled("p", m, self.tangent(1)))]
        if not self.unit:
            self.tangents.append(((0, 1), lambda m: self.scaled("z", m, self.widening())))

    # The vector (v, or u = v/|v|) and its tangent along t, by component: b, p, a.

    def length(self, name: str) -> Term:
        """``unit`` is 1/|v| and 0 for a zero vector, ``inv`` is 1/|v| and 1e12 for a zero vector."""
        if "q" not in self.text.known:
            q = self.text.let("q", [named(f"vx{i}") * named(f"vx{i}") for i in range(3)])
            zero, unit = named("zero"), named("unit")
            self.text.line("zero", [q], f"const bool zero = q < Real({EPS**2!r});")
            self.text.line("unit", [q, zero], "const Real unit = zero ? Real(0) : Real(1) / sqrt(q);")
            self.text.line("inv", [unit, zero], f"const Real inv = zero ? Real({1 / EPS!r}) : unit;")
        return named(name)

    def vector(self, i: int) -> Term:
        return self.text.let(f"u{i}", [named(f"vx{i}") * self.length("unit")]) if self.unit else named(f"vx{i}")

    def tangent(self, i: int) -> Term:
        if not self.unit:
            return named(f"tx{i}")
        return self.text.let(f"du{i}", [named(f"tx{i}"), -self.vector(i) * self.along()], self.length("inv"))

    def along(self) -> Term:
        return self.text.let("along", [self.vector(i) * named(f"tx{i}") for i in range(3)])

    def widening(self) -> Term:
        return self.text.let("dz", [self.vector(i) * self.tangent(i) for i in (0, 2)])

    # Profiles of degree l and order m, with N s_m folded in.

    def ratio(self, degree: int, m: int, number: Fraction, degree2: int = 0, m2: int = 0) -> float:
        """``number`` times the ratio of two profiles' N s_m, from exact fractions, so that 1 is exact."""
        squared = number**2 * self.squared(degree, m) / self.squared(degree2, m2)
        return math.copysign(math.sqrt(squared), number)

    def squared(self, degree: int, m: int) -> Fraction:
        """(N s_m)^2, without the factor 1 / 4 pi of ``integral``."""
        square = Fraction((2 if m else 1) * math.factorial(degree - m), math.factorial(degree + m))
        square *= 1 if self.normalization == "norm" else 2 * degree + 1
        return square if self.direction == "forward" else square * math.factorial(m) ** 2

    def profile(self, degree: int, m: int) -> Term:
        """N s_m Q. It is set to 0 for a zero vector if an output needs that and r^2 = 1 makes it nonzero at u = 0."""
        name, d, p = f"f{degree}_{m}", degree - m, self.vector(1)
        closed = [self.coefficient(degree, m, j) for j in range(d // 2 + 1)]
        if d < 2:
            return closed[0] * p if d else closed[0]
        if name in self.text.known:
            return self.text.known[name]
        guard = self.unit and d % 2 == 0 and m == (0 if self.direction == "forward" else 1)
        if not self.unit or d > CLOSED:
            return self.text.let(name, self.recursion(degree, m), p if d == 3 else ONE, guard)
        p2, total = self.text.let("p2", [p * p]), closed[0]
        for j, coefficient in enumerate(closed[1:-1]):
            total = self.text.let(f"k{j}_{degree}_{m}", [total * p2, coefficient])
        return self.text.let(name, [total * p2, closed[-1]], p if d % 2 else ONE, guard)

    def coefficient(self, degree: int, m: int, j: int) -> Term:
        """The coefficient of p^(l-m-2j) r^(2j) in a profile."""
        below = 2**degree * math.factorial(j) * math.factorial(degree - j) * math.factorial(degree - m - 2 * j)
        value = self.ratio(degree, m, Fraction((-1) ** j * math.factorial(2 * (degree - j)), below))
        return Term(value / math.sqrt(4 * math.pi) if self.normalization == "integral" else value)

    def recursion(self, degree: int, m: int) -> list[Term]:
        """The terms of the recursion of a profile; for l - m = 3 without the common factor p."""
        b, p, a = (self.vector(i) for i in range(3))
        p2, d, number = self.text.let("p2", [p * p]), degree - m, (degree - m) * (degree + m + 1)
        wide = self.text.let("wide", [ONE, -p2] if self.unit else [a * a, b * b])
        near = self.profile(degree, m + 1) * self.ratio(degree, m, Fraction(2 * (m + 1), number), degree, m + 1)
        far = self.profile(degree, m + 2) * self.ratio(degree, m, Fraction(-1, number), degree, m + 2)
        if d == 3:
            return [near, Term(far.coefficient) * wide]
        return [Term(near.coefficient) * p2 if d == 2 else near * p, far * wide]

    def derived(self, degree: int, m: int, by_p: int, by_z: int) -> Term:
        """A derivative of a profile: a multiple of another profile, or 0."""
        l2, m2, number = degree - by_p - by_z, m + by_z, (-1) ** by_z * math.perm(degree + m, by_p)
        if self.unit:
            l2, m2, number = degree, m + by_p, 1
        if m2 > l2:
            return ZERO
        profile = self.profile(l2, m2) * self.ratio(degree, m, Fraction(number), l2, m2)
        return self.text.let(f"f{'p' * by_p}{'z' * by_z}{degree}_{m}", [profile])

    # The plane: C_m and S_m, their tangents, and their products with a factor.

    def circle(self, m: int) -> tuple[Term, Term]:
        if m < 2:
            return (self.vector(2), self.vector(0)) if m else (ONE, ZERO)
        return self.rotated("", m, self.vector(2), self.vector(0), 1 if self.direction == "forward" else 1 / m)

    def turned(self, m: int) -> tuple[Term, Term]:
        return self.rotated("d", m, self.tangent(2), self.tangent(0), 1) if m else (ZERO, ZERO)

    def rotated(self, stem: str, m: int, a: Term, b: Term, factor: float) -> tuple[Term, Term]:
        """factor (C_(m-1) + i S_(m-1)) (a + i b)."""
        (c, s), outer = self.circle(m - 1), Term(factor)
        real = self.text.let(f"{stem}c{m}", [c * a, -s * b], outer)
        return real, self.text.let(f"{stem}s{m}", [s * a, c * b], outer)

    def scaled(self, stem: str, m: int, factor: Term) -> tuple[Term, Term]:
        c, s = self.circle(m)
        return self.text.let(f"{stem}c{m}", [c * factor]), self.text.let(f"{stem}s{m}", [s * factor])

    # Outputs.

    def components(self, stem: str, m: int, planes: list[_Plane]) -> None:
        """Assign orders m and -m of every block; a repeated degree copies its first block."""
        for degree, (first, *others) in self.centres.items():
            for sign in ((1, -1) if m else (1,)) if m <= degree else ():
                name = f"{stem}_{first + sign * m}"
                self.text.put(name, [self.derived(degree, m, *by) * plane(m)[sign < 0] for by, plane in planes])
                for other in others:
                    self.text.put(f"{stem}_{other + sign * m}", [named(name)])

    def summed(self, m: int, by: tuple[int, int]) -> tuple[Term, Term]:
        """Sums over degrees of cotangent times differentiated profile, for m and -m."""
        sums = [ZERO, ZERO]
        for k, sign in enumerate((1, -1) if m else (1,)):
            products = []
            for degree, (first, *others) in self.centres.items():
                if m <= degree:
                    same = [named(f"g_{centre + sign * m}") for centre in (first, *others)]
                    cotangent = self.text.let(f"sum_{first + sign * m}", same)
                    products.append(self.derived(degree, m, *by) * cotangent)
            sums[k] = self.text.let(f"e{'cs'[k]}{'p' * by[0]}{'z' * by[1]}{m}", products)
        return sums[0], sums[1]

    def gradient(self, m: int) -> None:
        """Add order m's part of the gradient w by b, p, a and (raw vectors) z, and of its tangent h."""
        double = self.direction == "double_backward"
        stems = ("w", "h") if self.unit else ("w", "ox") if double else ("ox", "")
        for stem, z, planes in ((stems[0], "wz", self.values), (stems[1], "hz", self.tangents if double else [])):
            for (by_p, by_z), plane in planes:
                for target, by in ((f"{stem}1", (by_p + 1, by_z)), *([] if self.unit else [(z, (by_p, by_z + 1))])):
                    (c, s), (plus, minus) = plane(m), self.summed(m, by)
                    self.text.add(target, [c * plus, s * minus])
                if m:
                    (c, s), (plus, minus) = plane(m - 1), self.summed(m, (by_p, by_z))
                    self.text.add(f"{stem}2", [c * plus, s * minus])
                    self.text.add(f"{stem}0", [c * minus, -s * plus])

    def finish(self) -> None:
        """Chain rule to v: for raw vectors from z to a and b, for unit vectors from u to v, in w and its tangent h."""
        double = self.direction == "double_backward"
        w, h = ([self.text.known.get(f"{stem}{i}", ZERO) for i in (0, 1, 2, "z")] for stem in "wh")
        v, dv = [self.vector(i) for i in range(3)], [self.tangent(i) if double else ZERO for i in range(3)]
        if not self.unit:
            for i in (0, 2):
                self.text.add(f"ox{i}", [v[i] * (h[3] if double else w[3]), dv[i] * w[3]])
            return
        dot = self.text.let("dot", [v[i] * w[i] for i in range(3)])
        turn = self.text.let("turn", [self.length("inv") * self.along()])
        both = zip(v + dv, h[:3] + w[:3], strict=True)
        radial = self.text.let("radial", [turn * dot, *(-x * y for x, y in both)]) if double else ZERO
        for i in range(3):
            terms = [h[i], -turn * w[i], -dot * dv[i], radial * v[i]] if double else [w[i], -v[i] * dot]
            self.text.add(f"ox{i}", [self.text.let(f"o{i}", terms, self.length("unit" if double else "inv"))])
