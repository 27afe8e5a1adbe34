"""Scalar C++ statements as data, without those that no output needs.

A *term* is a coefficient times a product of names. The writer of a body adds constants, assigned outputs and sums to
:class:`Statements` in the order of the text. Equal products are merged; factors of 1 and terms of 0 are omitted.
Numbers are written as ``Real(...)``, so the text serves float and double.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


class Statements:
    """Collects statements, each with the name it sets and the names it uses; :meth:`body` drops unused ones.

    assigned, added: prefixes of the names of outputs that are assigned, and of outputs that are added to.
    """

    def __init__(self, assigned: tuple[str, ...], added: tuple[str, ...]) -> None:
        self.assigned, self.added = assigned, added
        self.lines: list[tuple[str, tuple[str, ...], str]] = []
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
        needed: set[str] = set()
        kept: list[tuple[str, tuple[str, ...], str]] = []
        for name, used, text in reversed(self.lines):
            if name in needed or name.startswith(self.assigned + self.added):
                needed.update(used)
                kept.append((name, used, text))
        kept.reverse()
        names = dict.fromkeys(name for name, _, _ in kept)
        reads = dict.fromkeys(name for _, used, _ in kept for name in used if name not in names)
        writes = tuple(name for name in names if name.startswith(self.assigned))
        added = tuple(name for name in names if name.startswith(self.added))
        return Body(tuple(text for _, _, text in kept), tuple(reads), writes, added)
