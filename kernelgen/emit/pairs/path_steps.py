"""The three steps of a path in a kernel of pairs, as C++ text.

They compute pairs from inputs, multiply pairs by weights (``kernelgen.emit.pairs.weights``), and compute gradients of
the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernelgen.emit.pairs.weights import first_weights, one_pair_step, weight_step
from kernelgen.plan.pairs import PairPath, PairPlan
from kernelgen.terms.clebsch_gordan import PathTerms

INDENT = "    "
# The statements for one pair.
Body = Callable[[PairPlan, PairPath, PathTerms], Iterator[str]]


def path_steps(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    """All steps of one path for an edge."""
    problem, p, wanted = plan.spec.problem, path.path, plan.products
    texts = f"{problem.in1[p.in1].text} x {problem.in2[p.in2].text} -> {problem.out[p.out].text}"
    yield f"{{  // path {p.index}, {p.mode}: {texts}"
    if plan.in_registers(path):
        yield from (f"{INDENT}{line}" for line in (*_one_pair(plan, path, terms), "team.sync();"))
        yield "}"
        return
    lines = list(first_weights(plan, path))
    makes = wanted.value if plan.is_direct else wanted.z
    if makes:
        lines += [*_over_pairs(plan, path, terms, _z_lines, {y for sums in wanted.z for _, y in sums}), "team.sync();"]
    if not plan.is_direct:
        lines += [*weight_step(plan, path), "team.sync();"]
    if wanted.d:
        # Other lanes may read these sums.
        lines += [*_over_pairs(plan, path, terms, _gradient_lines, {y for y, _ in wanted.x}), "team.sync();"]
    yield from (f"{INDENT}{line}" for line in lines)
    yield "}"


def _one_pair(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    """Every lane computes the only pair in registers, and handles some copies of the output."""
    wanted = plan.products
    buffers = {y for sums in wanted.z for _, y in sums} | {y for y, _ in wanted.x}
    v = 1 if plan.spec.problem.mode(path.path).pairs == "upper" else 0
    yield f"constexpr int u = 0, v = {v}, k = 0;"
    yield from _edge_values(path, terms, sorted(buffers))
    yield from (f"Real z{number}[{terms.dim3}];" for number in range(len(wanted.z)))
    yield from _z_lines(plan, path, terms)
    yield from one_pair_step(plan, path)
    if wanted.d:
        lines = list(_start_sums(plan, terms, bool(wanted.y)))
        lines += _gradient_lines(plan, path, terms)
        lines += _add_sums(path, terms, together=False) if wanted.y else []
        yield "if (team.lane == 0) {"
        yield from (f"{INDENT}{line}" for line in lines)
        yield "}"


def _over_pairs(plan: PairPlan, path: PairPath, terms: PathTerms, body: Body, y_buffers: set[str]) -> Iterator[str]:
    """A loop over the pairs k = (u, v) of a path, with lanes over u and the y buffers' edge values at v."""
    problem, (mul1, mul2, _) = plan.spec.problem, path.muls
    kind = problem.mode(path.path).pairs
    values = list(_edge_values(path, terms, sorted(y_buffers)))
    sums_y = bool(plan.products.y) and body is _gradient_lines
    inside = list(body(plan, path, terms))
    if kind == "same":
        yield f"EACH(u, {mul1}) {{"
        lines = ["const int v = u, k = u;", *values, *_start_sums(plan, terms, sums_y), *inside]
        lines += list(_add_sums(path, terms, together=False)) if sums_y else []
        yield from (f"{INDENT}{line}" for line in lines)
        yield "}"
        return
    if plan.is_direct and body is _z_lines and kind == "all" and mul2 > 1:
        # Lanes over pairs, so that neighbouring lanes write neighbouring elements.
        yield f"EACH(k, {mul1 * mul2}) {{"
        lines = [f"const int u = k / {mul2}, v = k % {mul2};", *values, *inside]
        yield from (f"{INDENT}{line}" for line in lines)
        yield "}"
        return
    yield f"for (int v = 0; v < {mul2}; ++v) {{"
    yield from (f"{INDENT}{line}" for line in (*values, *_start_sums(plan, terms, sums_y)))
    count = str(mul1) if kind == "all" else "v"
    number = f"u * {mul2} + v" if kind == "all" else f"u * ({2 * mul1 - 1} - u) / 2 + v - u - 1"
    yield f"{INDENT}EACH(u, {count}) {{"
    yield from (f"{INDENT * 2}{line}" for line in (f"const int k = {number};", *inside))
    yield f"{INDENT}}}"
    if sums_y:
        yield from (f"{INDENT}{line}" for line in _add_sums(path, terms, together=True))
    yield "}"


def _prefix(buffer: str) -> str:
    return buffer[:-1]


def _edge_values(path: PairPath, terms: PathTerms, buffers: list[str]) -> Iterator[str]:
    """``m_1`` and ``tm_1``: the edge values of y and ty at copy v."""
    step = path.dims[1]
    for buffer in buffers:
        for number, value in enumerate(terms.values):
            total = " + ".join(f"Real({c!r}) * s_{buffer}[{component} + v * {step}]" for component, c in value.terms)
            yield f"const Real {_prefix(buffer)}m_{number} = {total};"


def _rows_of_x(plan: PairPlan, path: PairPath, buffers: set[str]) -> Iterator[str]:
    """``x_0`` and ``tx_0``: the components of x and tx at copy u."""
    block = plan.spec.problem.in1[path.path.in1]
    for buffer in sorted(buffers):
        for m in range(block.dim):
            yield f"const Real {buffer}_{m} = s_{buffer}[{block.offset + m * block.mul} + u];"


def _sum(products: list[tuple[int, str]]) -> str:
    """The sum of signed products as an expression."""
    text = "".join(f" {'-' if sign < 0 else '+'} {product}" for sign, product in products)
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}" if text else "Real(0)"


def _z_lines(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    yield from _rows_of_x(plan, path, {x for sums in plan.products.z for x, _ in sums})
    of_value = [plan.products.z.index(sums) for w, sums in plan.products.value if w == "w"]
    for number, sums in enumerate(plan.products.z):
        if plan.is_direct and number not in of_value:
            continue
        for m3 in range(terms.dim3):
            products = [
                (entry.sign, f"{_prefix(y)}m_{entry.value} * {x}_{entry.m1}")
                for x, y in sums
                for entry in terms.entries
                if entry.m3 == m3
            ]
            if plan.is_direct:
                yield f"if (team.active) out_g[{_place(plan, path, m3)}] = {_sum(products)};"
            else:
                yield f"z{number}[{m3 * path.pairs} + k] = {_sum(products)};"


def _place(plan: PairPlan, path: PairPath, m3: int) -> str:
    """Position of pair k's component in a row of the output."""
    offset = plan.spec.problem.out[path.path.out].offset
    if plan.spec.layout == "ir_mul":
        return f"{offset + m3 * path.pairs} + k"
    return f"{offset + m3} + k * {path.dims[2]}"


def _flow(plan: PairPlan, path: PairPath, number: int, m3: int) -> str:
    """The expression of ``d`` for pair k."""
    if not plan.is_direct:
        return f"d{number}[{m3 * path.pairs} + k]"
    place = _place(plan, path, m3)
    return " + ".join(f"{g}[{place}]" for w, g in plan.products.d[number] if w == "w") or "Real(0)"


def _gradient_lines(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    """Gradients of x (added to its row) and of the edge values (``r_1``, summed over u), from d."""
    block, wanted = plan.spec.problem.in1[path.path.in1], plan.products
    for number in range(len(wanted.d)):
        yield from (f"const Real d{number}_{m3} = {_flow(plan, path, number, m3)};" for m3 in range(terms.dim3))
    for m1 in range(terms.dim1):
        products = [
            (entry.sign, f"{_prefix(y)}m_{entry.value} * d{wanted.d.index(sums)}_{entry.m3}")
            for y, sums in wanted.x
            for entry in terms.entries
            if entry.m1 == m1
        ]
        if products:
            yield f"o_x[{block.offset + m1 * block.mul} + u] += {_sum(products)};"
    yield from _rows_of_x(plan, path, {x for x, _ in wanted.y})
    for value in range(len(terms.values)):
        products = [
            (entry.sign, f"{x}_{entry.m1} * d{wanted.d.index(sums)}_{entry.m3}")
            for x, sums in wanted.y
            for entry in terms.entries
            if entry.value == value
        ]
        if products:
            yield f"r_{value} += {_sum(products)};"


def _start_sums(plan: PairPlan, terms: PathTerms, wanted: bool) -> list[str]:
    return [f"Real r_{number} = 0;" for number in range(len(terms.values))] if wanted else []


def _add_sums(path: PairPath, terms: PathTerms, together: bool) -> Iterator[str]:
    """Add to dF/dy of copy v, by the transpose of the edge values. together: every lane has a part of r."""
    totals: dict[int, list[str]] = {}
    for number, value in enumerate(terms.values):
        for component, c in value.terms:
            totals.setdefault(component, []).append(f"Real({c!r}) * r_{number}")
    for component, products in sorted(totals.items()):
        total = " + ".join(products)
        place = f"o_y[{component} + v * {path.dims[1]}]"
        if together:
            yield f"{{ const Real total = team.sum({total}); if (team.lane == 0) {place} += total; }}"
        else:
            yield f"{place} += {total};"
