"""Gradients of paths with one attribute or one cotangent, which lanes compute with as few products as they need.

Such a path has one term for each component of x: ``w x[i] y g[i]`` with one component of y (of degree 0), or
``w x[i] y[i] g`` with one of g. Names are those of ``kernelgen.terms.path_statements``, for a lane's channel ``c``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.terms.clebsch_gordan import PathTerms


def has_one_attribute(terms: PathTerms) -> bool:
    """Whether all entries are the same component of y, with one factor."""
    signs = {entry.sign for entry in terms.entries}
    return len(terms.values) == len(signs) == len(terms.values[0].terms) == 1


def has_one_cotangent(terms: PathTerms) -> bool:
    """Whether each entry is one component of y with a factor, and there is one component of g."""
    return terms.dim3 == 1 and all(len(value.terms) == 1 for value in terms.values)


def with_one_attribute(terms: PathTerms, live: str, gradient: str) -> Iterator[str]:
    """Statements of a path: the sum of products of x and g serves weights and the attribute."""
    path, entries = terms.path, terms.entries
    p, (component, factor), sign = path.index, terms.values[0].terms[0], entries[0].sign
    products = " + ".join(f"row.x{path.in1}[{e.m1}][c] * g{path.out}[{e.m3}][c]" for e in entries)
    minus = "-" if sign < 0 else ""
    if "y" in live:
        yield f"Real r{p} = 0;"
    yield "UNROLL for (int c = 0; c < C; ++c) {"
    if "y" in live or "w" in live:
        yield f"    const Real product = {products};"
    if "w" in live:
        yield f"    {gradient} = {minus}m{p}_0 * product;"
    if "y" in live:
        yield f"    r{p} += row.w{p}[c] * product;"
    if "x" in live:
        yield f"    const Real weighted = {minus}m{p}_0 * row.w{p}[c];"
        for e in entries:
            yield f"    ox{path.in1}[{e.m1}][c] += weighted * g{path.out}[{e.m3}][c];"
    yield "}"
    if "y" in live:
        yield f"oy[{component}] += Real({sign * factor!r}) * r{p};"


def with_one_cotangent(terms: PathTerms, live: str, gradient: str) -> Iterator[str]:
    """Statements of a path: the weighted cotangent serves x and the attributes."""
    path, p = terms.path, terms.path.index
    g = f"g{path.out}[0][c]"
    if "y" in live:
        yield f"Real r{p}[{len(terms.entries)}] = {{}};"
    yield "UNROLL for (int c = 0; c < C; ++c) {"
    if "x" in live or "y" in live:
        yield f"    const Real weighted = row.w{p}[c] * {g};"
    for number, e in enumerate(terms.entries):
        sign = "-" if e.sign < 0 else "+"
        if "x" in live:
            yield f"    ox{path.in1}[{e.m1}][c] {sign}= m{p}_{e.value} * weighted;"
        if "y" in live:
            yield f"    r{p}[{number}] += row.x{path.in1}[{e.m1}][c] * weighted;"
    if "w" in live:
        signed = (f"{'-' if e.sign < 0 else '+'} m{p}_{e.value} * row.x{path.in1}[{e.m1}][c]" for e in terms.entries)
        yield f"    {gradient} = ({' '.join(signed)}) * {g};"
    yield "}"
    for number, e in enumerate(terms.entries if "y" in live else ()):
        component, factor = terms.values[e.value].terms[0]
        yield f"oy[{component}] += Real({e.sign * factor!r}) * r{p}[{number}];"
