"""The device function for one vector as C++ text, from the statements of ``kernelgen.terms.harmonics_statements``.

Kernels of harmonics contain it, and so do kernels of products that compute y from vectors (:func:`inside`). The text
around it defines ``Real`` and ``DEVICE``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.terms.harmonics_statements import harmonics_body
from kernelgen.terms.scalar_statements import Body

INDENT = "    "


def vector_function(name: str, body: Body, makes_x: bool, rows: tuple[str, ...], step: str = "") -> Iterator[str]:
    """A function whose arguments are ``rows`` (v, t, g read; out_v, out_g written), indexed by ``[number{step}]``.

    Components of rows of harmonics are references, so that each is read only where it is used.
    """
    arguments = (f"{'' if row.startswith('out') else 'const '}Real* __restrict__ {row}" for row in rows)
    yield f"DEVICE void {name}({', '.join(arguments)})"
    yield "{"
    for read in sorted(body.reads, key=_place):
        stem, number = _place(read)
        row = {"vx": "v", "tx": "t", "g_": "g"}[stem]
        yield f"{INDENT}const Real{'&' if row == 'g' else ''} {read} = {row}[{number}{step}];"
    for written in sorted(body.writes, key=_place):
        yield f"{INDENT}Real& {written} = out_g[{_place(written)[1]}{step}];"
    if makes_x:
        yield f"{INDENT}Real ox0 = 0, ox1 = 0, ox2 = 0;"
    yield from (f"{INDENT}{statement}" for statement in body.statements)
    if makes_x:
        yield f"{INDENT}{' '.join(f'out_v[{i}{step}] = ox{i};' for i in range(3))}"
    yield "}"
    yield ""


def _place(name: str) -> tuple[str, int]:
    """Row and component of a name: ``vx1`` is component 1 of ``vx``, ``og_12`` component 12 of ``og_``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :])


def inside(spec: Spec) -> str:
    """Functions for a product with harmonics: ``harmonics(v, out_g)``; for dF/dy also ``along_v(v, g, out_v)``."""
    if spec.harmonics is None:
        return ""
    functions = [vector_function("harmonics", _body(spec.harmonics, "forward"), False, ("v", "out_g"))]
    if "y" in spec.direction.live_outputs:
        gradient = _body(spec.harmonics, "backward")
        functions.append(vector_function("along_v", gradient, True, ("v", "g", "out_v")))
    return "\n".join(line for function in functions for line in function)


@functools.lru_cache(maxsize=64)
def _body(problem: HarmonicsProblem, direction: str) -> Body:
    return harmonics_body(problem, direction)
