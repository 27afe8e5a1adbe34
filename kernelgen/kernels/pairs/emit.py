"""The kernel of a :class:`PairPlan` as C++ text, for GPU and host.

A team processes an edge: it loads rows of operands to its scratch memory; then each path computes its pairs, multiplies
them by weights and adds to the sums. Formulas are in ``kernelgen.kernels.pairs.plan``, differences between a warp and a
host thread in ``include/pairs.hpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kernelgen.arithmetic.couplings import PathTerms, path_terms
from kernelgen.kernels.pairs.plan import WARP, Buffers, PairPath, PairPlan, Products
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import (
    BUFFERS,
    C_TYPES,
    INDENT,
    Spec,
    braced,
    buffers_line,
    buffers_struct,
    element,
    gpu_entry,
    host_entry,
    indented,
)
from kernelgen.problem.irreps import Block

SIDES = {"x": "in1", "g": "out"}


def emit_pairs(plan: PairPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    entry = _gpu(plan) if plan.on_gpu else _host(plan)
    parts = [_preamble(plan), included("pairs.hpp"), buffers_struct(), *_edge(plan), *entry]
    return Source("\n".join(parts) + "\n", "cuda" if plan.on_gpu else "c++")


def pair_launch(plan: PairPlan) -> LaunchRule:
    """A team for each part of each edge."""
    schedule = plan.spec.cuda
    share = Share("edges", (plan.teams,), times=len(plan.parts))
    # Each block adds its sums to memory once, so launch only as many blocks as the device runs at a time.
    most = max(1, plan.spec.facts.shared_per_block // plan.shared_bytes) if plan.weight_sums else 0
    return LaunchRule(schedule.block_size, plan.shared_bytes, (share,), most_of_unit=most)


def heading(spec: Spec) -> list[str]:
    """Comments that describe a kernel."""
    return [
        f"// problem    {spec.problem.key}",
        f"// direction  {spec.direction.text}",
        f"// operation  {spec.operation}, {spec.dtype}, {spec.layout}",
        f"// schedule   {spec.schedule.key}",
    ]


def _preamble(plan: PairPlan) -> str:
    spec = plan.spec
    lines = [
        *heading(spec),
        *(["#define ON_GPU"] if plan.on_gpu else ["#include <omp.h>", "#include <cstdint>", "#include <vector>"]),
        f"using Real = {C_TYPES[spec.dtype]};",
        f"constexpr bool MUL_IR = {'true' if spec.layout == 'mul_ir' else 'false'};",
        f"constexpr int LANES = {plan.lanes};",
        f"using index_t = {C_TYPES[spec.index]};",
    ]
    return "\n".join(lines)


def _edge(plan: PairPlan) -> Iterator[str]:
    """The function for an edge, or one for each part of an edge."""
    out_w = ", Real* const out_w" if "w" in plan.spec.direction.live_outputs else ""
    for number, part in enumerate(plan.parts):
        yield (
            f"DEVICE void {_function(plan, number)}(const Buffers& b, const Team& team, const long long edge, "
            f"Real* const scratch{out_w})"
        )
        yield from ("{", *indented(_edge_lines(plan, part)), "}", "")


def _function(plan: PairPlan, part: int) -> str:
    return f"part_{part}" if len(plan.parts) > 1 else "one_edge"


def _edge_lines(plan: PairPlan, part: tuple[PairPath, ...]) -> Iterator[str]:
    problem, direction = plan.spec.problem, plan.spec.direction
    for name in list(plan.scratch)[:-1]:
        yield f"Real* const __restrict__ {name} = scratch + {plan.scratch[name]};"
    row = "" if problem.shared_weights else f" + edge * {problem.weight_numel}"
    for name in ("w", "tw"):
        if name in direction.operands:
            yield f"const Real* const __restrict__ {name} = b.{name}{row};"
    if plan.is_direct:  # pairs access the edge's rows themselves
        for name in direction.operands:
            if name[-1] == "g":
                yield f"const Real* const __restrict__ {name} = b.{name} + edge * {problem.dim_out};"
        if "g" in direction.live_outputs:
            yield f"Real* const __restrict__ out_g = b.out_g + edge * {problem.dim_out};"
    yield from _load_rows(plan, part)
    for slot in _summed(plan):
        size = {"x": problem.dim_in1, "y": problem.dim_in2, "g": problem.dim_out}[slot]
        yield f"clear_row<{size}>(team, o_{slot});"
    yield "team.sync();"
    terms = path_terms(problem)
    for path in part:
        yield from path_steps(plan, path, terms[path.path.index])
    yield from _store_rows(plan, part)


def _blocks(plan: PairPlan, part: tuple[PairPath, ...], slot: str) -> Iterator[Block]:
    """Blocks of x or g: all, or those that a part uses if there are several."""
    side = SIDES[slot]
    used = {getattr(path.path, side) for path in part}
    for number, block in enumerate(getattr(plan.spec.problem, side)):
        if len(plan.parts) == 1 or number in used:
            yield block


def _summed(plan: PairPlan) -> str:
    """Outputs whose rows are summed in scratch memory."""
    return "".join(slot for slot in plan.spec.direction.live_outputs if f"o_{slot}" in plan.scratch)


def _load_rows(plan: PairPlan, part: tuple[PairPath, ...]) -> Iterator[str]:
    problem = plan.spec.problem
    for name in plan.spec.direction.operands:
        if name[-1] == "y":
            yield f"load_row<{problem.dim_in2}>(team, b.{name} + edge * {problem.dim_in2}, s_{name});"
        elif f"s_{name}" in plan.scratch:
            size = problem.dim_in1 if name[-1] == "x" else problem.dim_out
            row = _row(plan, name[-1])
            for block in _blocks(plan, part, name[-1]):
                where = f"b.{name} + {row} * {size} + {block.offset}, s_{name} + {block.offset}"
                yield f"load_block<{block.dim}, {block.mul}>(team, {where});"


def _row(plan: PairPlan, slot: str) -> str:
    """Row number of x or g: the edge's, or its sender's or receiver's in a convolution."""
    if not plan.is_conv:
        return "edge"
    return {"x": "(long long)b.sender[edge]", "g": "(long long)b.receiver[edge]"}[slot]


def _store_rows(plan: PairPlan, part: tuple[PairPath, ...]) -> Iterator[str]:
    problem, shared = plan.spec.problem, len(plan.parts) > 1
    for slot in _summed(plan):
        if slot == "y":
            how = "add" if shared else "store"
            yield f"{how}_row<{problem.dim_in2}>(team, o_y, b.out_y + edge * {problem.dim_in2});"
            continue
        size = problem.dim_in1 if slot == "x" else problem.dim_out
        row, how = _row(plan, slot), "add" if plan.is_conv or shared else "store"
        for block in _blocks(plan, part, slot):
            where = f"o_{slot} + {block.offset}, b.out_{slot} + {row} * {size} + {block.offset}"
            yield f"{how}_block<{block.dim}, {block.mul}>(team, {where});"
    yield "team.sync();"


def _weight_row(plan: PairPlan, shared: str) -> str:
    """The argument for gradients of weights: the edge's row, or ``shared``, sums over a worker's edges."""
    if "w" not in plan.spec.direction.live_outputs:
        return ""
    return f", {shared}" if plan.sums_weights else f", b.out_w + edge * {plan.spec.problem.weight_numel}"


def _gpu(plan: PairPlan) -> Iterator[str]:
    schedule, sums = plan.spec.cuda, plan.weight_sums
    teams, size = plan.teams, plan.scratch["end"]
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield buffers_line()
    yield f"{INDENT}extern __shared__ __align__(16) unsigned char shared_bytes[];"
    yield f"{INDENT}Real* const shared = reinterpret_cast<Real*>(shared_bytes);"
    yield f"{INDENT}const int team_index = threadIdx.x / LANES;"
    yield f"{INDENT}Team team{{int(threadIdx.x % LANES), true}};"
    yield f"{INDENT}const long long first = blockIdx.x * {teams}ll + team_index;"
    arguments = f"(b, team, edge, shared + team_index * {size}{_weight_row(plan, 'sums' if sums else 'b.out_w')});"
    if sums:
        yield f"{INDENT}Real* const sums = shared + {teams * size};"
        yield f"{INDENT}for (int i = threadIdx.x; i < {sums}; i += {schedule.block_size}) sums[i] = Real(0);"
        yield f"{INDENT}__syncthreads();"
        head = f"for (long long i = first; {_any_left(plan)}; i += gridDim.x * {teams}ll)"
        yield from indented(_shares(plan, head, arguments))
        yield f"{INDENT}__syncthreads();"
        yield f"{INDENT}for (int i = threadIdx.x; i < {sums}; i += {schedule.block_size}) add_to(b.out_w + i, sums[i]);"
    else:
        yield f"{INDENT}const long long i = first;"
        yield from indented(_shares(plan, f"if ({_any_left(plan)})", arguments))
    yield "}"


def _any_left(plan: PairPlan) -> str:
    """The condition that some team of the warp still has an edge or a part of one."""
    warp = "i" if plan.lanes == WARP else f"i - team_index % {WARP // plan.lanes}"
    return f"{warp} < num_edges * {len(plan.parts)}"


def _shares(plan: PairPlan, head: str, arguments: str) -> Iterator[str]:
    """The work of team i: edge i, or one part of an edge that it shares with neighbouring teams."""
    count = len(plan.parts)
    if plan.lanes == WARP:
        lines = [f"const long long edge = i{f' / {count}' if count > 1 else ''};"]
    else:
        lines = ["team.active = i < num_edges;", "const long long edge = team.active ? i : num_edges - 1;"]
    for number in range(count):
        test = "" if number + 1 == count else f"if (i % {count} == {number}) "
        lines.append(f"{'else ' if number else ''}{test}{_function(plan, number)}{arguments}")
    return braced(head, lines)


def _host(plan: PairPlan) -> Iterator[str]:
    problem = plan.spec.problem
    yield from host_entry()
    casts = (f"static_cast<{element(name)}* __restrict__>({name})" for name in BUFFERS)
    yield f"{INDENT}const Buffers b = {{{', '.join(casts)}}};"
    yield "#pragma omp parallel num_threads(threads > 0 ? threads : omp_get_max_threads())"
    yield f"{INDENT}{{"
    yield f"{INDENT * 2}std::vector<Real> scratch({max(1, plan.scratch['end'])});"
    if plan.sums_weights:
        yield f"{INDENT * 2}std::vector<Real> sums({problem.weight_numel});"
    yield "#pragma omp for schedule(static)"
    yield f"{INDENT * 2}for (long long edge = 0; edge < num_edges; ++edge)"
    yield f"{INDENT * 3}one_edge(b, Team{{}}, edge, scratch.data(){_weight_row(plan, 'sums.data()')});"
    if plan.sums_weights:
        yield "#pragma omp critical(equitune_out_w)"
        yield f"{INDENT * 2}for (int i = 0; i < {problem.weight_numel}; ++i) b.out_w[i] += sums[i];"
    yield f"{INDENT}}}"
    yield "}"


# The three steps of a path in a kernel of pairs, as C++ text.
#
# They compute pairs from inputs, multiply pairs by weights, and compute gradients of the inputs.

# The statements for one pair.
Body = Callable[[PairPlan, PairPath, PathTerms], Iterator[str]]


def path_steps(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    """All steps of one path for an edge."""
    problem, p = plan.spec.problem, path.path
    texts = f"{problem.in1[p.in1].text} x {problem.in2[p.in2].text} -> {problem.out[p.out].text}"
    lines: list[str] = []
    if plan.in_registers(path):
        lines += [*_one_pair(plan, path, terms), "team.sync();"]
    else:
        lines += _steps_in_memory(plan, path, terms)
    yield from (f"{{  // path {p.index}, {p.mode}: {texts}", *indented(lines), "}")


def _steps_in_memory(plan: PairPlan, path: PairPath, terms: PathTerms) -> list[str]:
    wanted, lines = plan.products, []
    if plan.fetches(path):  # starts the copy of the first weights before pairs are computed
        lines += [*_sizes(plan, path), *_fetch_function(plan, path), "fetch_rows(0, 0);"]
    makes = wanted.value if plan.is_direct else wanted.z
    if makes:
        lines += [*_over_pairs(plan, path, terms, _z_lines, {y for sums in wanted.z for _, y in sums}), "team.sync();"]
    if not plan.is_direct:
        lines += [*(_dense(plan, path) if plan.is_dense(path) else _single(plan, path)), "team.sync();"]
    if wanted.d:
        # Other lanes may read these sums.
        lines += [*_over_pairs(plan, path, terms, _gradient_lines, {y for y, _ in wanted.x}), "team.sync();"]
    return lines


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
        starts, ends = _sums_of_y(path, terms, together=False) if wanted.y else ([], [])
        yield from braced("if (team.lane == 0)", [*starts, *_gradient_lines(plan, path, terms), *ends])


def _over_pairs(plan: PairPlan, path: PairPath, terms: PathTerms, body: Body, y_buffers: set[str]) -> Iterator[str]:
    """A loop over the pairs k = (u, v) of a path, with lanes over u and the y buffers' edge values at v."""
    problem, (mul1, mul2, _) = plan.spec.problem, path.muls
    kind = problem.mode(path.path).pairs
    values = list(_edge_values(path, terms, sorted(y_buffers)))
    sums_y = bool(plan.products.y) and body is _gradient_lines
    inside = list(body(plan, path, terms))
    starts, ends = _sums_of_y(path, terms, together=kind != "same") if sums_y else ([], [])
    if kind == "same":
        return braced(f"EACH(u, {mul1})", ["const int v = u, k = u;", *values, *starts, *inside, *ends])
    if plan.is_direct and body is _z_lines and kind == "all" and mul2 > 1:
        # Lanes over pairs, so that neighbouring lanes write neighbouring elements.
        return braced(f"EACH(k, {mul1 * mul2})", [f"const int u = k / {mul2}, v = k % {mul2};", *values, *inside])
    count = str(mul1) if kind == "all" else "v"
    number = f"u * {mul2} + v" if kind == "all" else f"u * ({2 * mul1 - 1} - u) / 2 + v - u - 1"
    over_u = braced(f"EACH(u, {count})", [f"const int k = {number};", *inside])
    return braced(f"for (int v = 0; v < {mul2}; ++v)", [*values, *starts, *over_u, *ends])


def _edge_values(path: PairPath, terms: PathTerms, buffers: list[str]) -> Iterator[str]:
    """``m_1`` and ``tm_1``: the edge values of y and ty at copy v."""
    step = path.dims[1]
    for buffer in buffers:
        for number, value in enumerate(terms.values):
            total = " + ".join(f"Real({c!r}) * s_{buffer}[{component} + v * {step}]" for component, c in value.terms)
            yield f"const Real {buffer[:-1]}m_{number} = {total};"


def _rows_of_x(plan: PairPlan, path: PairPath, buffers: set[str]) -> Iterator[str]:
    """``x_0`` and ``tx_0``: the components of x and tx at copy u."""
    block = plan.spec.problem.in1[path.path.in1]
    for buffer in sorted(buffers):
        for m in range(block.dim):
            yield f"const Real {buffer}_{m} = s_{buffer}[{block.offset + m * block.mul} + u];"


# Sums of a path's terms as expressions of ``x_0``, ``m_0`` (edge values) and ``d0_0``; empty without terms. first: the
# number of the path's first component of x.


def pair(sums: Buffers, terms: PathTerms, m3: int, first: int = 0) -> str:
    """Component m3 of a sum of pairs z."""
    products = (
        (entry.sign, f"{y[:-1]}m_{entry.value} * {x}_{first + entry.m1}")
        for x, y in sums
        for entry in terms.entries
        if entry.m3 == m3
    )
    return _sum(products) or "Real(0)"


def gradient_of_x(wanted: Products, terms: PathTerms, m1: int) -> str:
    return _sum(
        (entry.sign, f"{y[:-1]}m_{entry.value} * d{wanted.d.index(sums)}_{entry.m3}")
        for y, sums in wanted.x
        for entry in terms.entries
        if entry.m1 == m1
    )


def gradient_of_value(wanted: Products, terms: PathTerms, value: int, first: int = 0) -> str:
    return _sum(
        (entry.sign, f"{x}_{first + entry.m1} * d{wanted.d.index(sums)}_{entry.m3}")
        for x, sums in wanted.y
        for entry in terms.entries
        if entry.value == value
    )


def _sum(products: Iterable[tuple[int, str]]) -> str:
    text = "".join(f" {'-' if sign < 0 else '+'} {product}" for sign, product in products)
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}" if text else ""


def _z_lines(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    yield from _rows_of_x(plan, path, {x for sums in plan.products.z for x, _ in sums})
    of_value = [plan.products.z.index(sums) for w, sums in plan.products.value if w == "w"]
    for number, sums in enumerate(plan.products.z):
        if plan.is_direct and number not in of_value:
            continue
        for m3 in range(terms.dim3):
            if plan.is_direct:
                yield f"if (team.active) out_g[{_place(plan, path, m3)}] = {pair(sums, terms, m3)};"
            else:
                yield f"z{number}[{m3 * path.pairs} + k] = {pair(sums, terms, m3)};"


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
        if total := gradient_of_x(wanted, terms, m1):
            yield f"o_x[{block.offset + m1 * block.mul} + u] += {total};"
    yield from _rows_of_x(plan, path, {x for x, _ in wanted.y})
    for value in range(len(terms.values)):
        if total := gradient_of_value(wanted, terms, value):
            yield f"r_{value} += {total};"


def _sums_of_y(path: PairPath, terms: PathTerms, together: bool) -> tuple[list[str], list[str]]:
    """The start of the sums r, and what adds them to dF/dy of copy v, by the transpose of the edge values.

    together: every lane has a part of r.
    """
    totals: dict[int, list[str]] = {}
    for number, value in enumerate(terms.values):
        for component, c in value.terms:
            totals.setdefault(component, []).append(f"Real({c!r}) * r_{number}")
    adds = "{{ const Real total = team.sum({1}); if (team.lane == 0) {0} += total; }}" if together else "{0} += {1};"
    places = [(f"o_y[{component} + v * {path.dims[1]}]", sums) for component, sums in sorted(totals.items())]
    ends = [adds.format(place, " + ".join(sums)) for place, sums in places]
    return [f"Real r_{number} = 0;" for number in range(len(terms.values))], ends


# The step of a path that combines pairs with weights, as C++ text: values, gradients of weights, and ``d``.
#
# A path with a weight for every pair and copy of the output is a small matrix product: lanes take columns of the matrix
# (and several rows if there are fewer columns than lanes), so that each weight is read once, in memory order. All other
# paths have one weight a pair, or none.


# Over components of the output.
EACH_M = "UNROLL for (int m = 0; m < M; ++m)"


def _weight_gradient(plan: PairPlan, at: str, z_at: str, g_at: str) -> list[str]:
    """The gradient of the weight ``at``, if it is wanted. z_at: the place in a sum z; g_at: that of cotangent {g}."""
    wanted = plan.products
    products = " + ".join(f"z{wanted.z.index(sums)}[{z_at}] * {g_at.format(g=g)}" for g, sums in wanted.weight)
    put = f"add_to(out_w + {at}, gradient)" if plan.spec.problem.shared_weights else f"out_w[{at}] = gradient"
    lines = ["Real gradient = 0;", f"{EACH_M} gradient += {products};", f"if (team.active) {put};"]
    return lines if wanted.weight else []


# ---- a weight for every pair and copy of the output ---------------------------------------------------------------


def _dense(plan: PairPlan, path: PairPath) -> Iterator[str]:
    if not plan.fetches(path):
        yield from _sizes(plan, path)
    tile, columns = plan.tile(path), min(plan.tile(path), plan.lanes)
    whole = tile % columns == 0 and path.columns % tile == 0
    inside = "true" if whole else "n < min(N, n0 + TILE)"
    row_of_g = f"{plan.spec.problem.out[path.path.out].offset} + m * N"
    yield from braced("for (int n0 = 0; n0 < N; n0 += TILE)", _tile_lines(plan, path, row_of_g, inside))


def _sizes(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """Sizes of the matrix, of a tile of its columns, and of the lanes' parts of a tile."""
    tile = plan.tile(path)
    columns = min(tile, plan.lanes)
    rows, tiles = plan.lanes // columns, -(-tile // columns)
    yield f"constexpr int K = {path.pairs}, N = {path.columns}, M = {path.dims[2]}, TILE = {tile}, TILES = {tiles};"
    yield f"constexpr int COLS = {columns}, ROWS = {rows}, STEP = {plan.lanes if plan.products.d else path.pairs};"
    yield "const int row = team.lane / COLS, col = team.lane % COLS;"


def _tile_lines(plan: PairPlan, path: PairPath, row_of_g: str, inside: str) -> Iterator[str]:
    """One tile of columns. inside: condition that column n belongs to it."""
    wanted, column = plan.products, "const int n = n0 + col + COLS * i;"
    every = f"{EACH_M} UNROLL for (int i = 0; i < TILES; ++i)"
    if wanted.value:
        yield "Real sums[M][TILES] = {};"
    for g, _ in wanted.weight:
        yield f"Real own_{g}[M][TILES] = {{}};"
        own = f"if (row < ROWS && {inside}) own_{g}[m][i] = s_{g}[{row_of_g} + n];"
        yield from braced(every, [column, own])
    elements = list(_element_lines(plan, path))
    columns = braced("UNROLL for (int i = 0; i < TILES; ++i)", [column, f"if (!({inside})) continue;", *elements])
    over_rows = braced(
        "if (row < ROWS) SOME_ROWS for (int kk = row; kk < rows; kk += ROWS)", ["const int k = k0 + kk;", *columns]
    )
    step = ["const int rows = min(STEP, K - k0);", *(over_rows if elements else ())]
    yield from braced("for (int k0 = 0; k0 < K; k0 += STEP)", [*step, *(_flow_lines(plan, path) if wanted.d else ())])
    if wanted.value:
        total = "const Real total = sum_rows<ROWS, COLS>(team, sums[m][i]);"
        yield from braced(every, [column, total, f"if (row == 0 && {inside}) o_g[{row_of_g} + n] += total;"])


def _weights_of_d(plan: PairPlan) -> list[str]:
    return list(dict.fromkeys(w for sums in plan.products.d for w, _ in sums))


def _fetch_function(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """``fetch_rows(k0, n0)``: starts the copy of the weights of STEP rows and a tile of columns."""
    at = f"{path.path.weight_offset} + (k0 + kk) * N + n0 + n"
    fetches = (f"if (n < width) fetch(c_{w} + kk * {plan.stride(path)} + n, {w} + {at});" for w in _weights_of_d(plan))
    lines = [
        "const int rows = min(STEP, K - k0), width = min(TILE, N - n0);",
        "if (row < ROWS) SOME_ROWS for (int kk = row; kk < rows; kk += ROWS)",
        *indented(braced("UNROLL for (int i = 0; i < TILES; ++i)", ["const int n = col + COLS * i;", *fetches])),
    ]
    return braced("const auto fetch_rows = [&](int k0, int n0)", lines, end="};")


def _element_lines(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """Statements for the weight of pair k and column n."""
    wanted, kept = plan.products, [] if plan.fetches(path) else _weights_of_d(plan)
    read = [w for w, _ in wanted.value] + kept
    at = f"{path.path.weight_offset} + k * N + n"
    for w in dict.fromkeys(read):
        yield f"const Real this_{w} = {w}[{at}];"
    for w, sums in wanted.value:
        z = f"z{wanted.z.index(sums)}"
        yield f"{EACH_M} sums[m][i] += this_{w} * {z}[m * K + k];"
    yield from _weight_gradient(plan, at, "m * K + k", "own_{g}[m][i]")
    for w in kept:
        yield f"c_{w}[kk * {plan.stride(path)} + n - n0] = this_{w};"


def _flow_lines(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """``d`` of the current rows, one row a lane, from the weights in scratch memory."""
    stride, block = plan.stride(path), plan.spec.problem.out[path.path.out]
    yield "await_fetched(team);" if plan.fetches(path) else "team.sync();"
    lines = []
    for number, sums in enumerate(plan.products.d):
        lines.append(f"Real flow{number}[M] = {{}};")
        for w, g in sums:
            rows = f"c_{w} + team.lane * {stride}, s_{g} + {block.offset} + n0, min(TILE, N - n0)"
            lines.append(f"meet<M, N>({rows}, flow{number});")
        place = f"d{number}[m * K + k0 + team.lane]"
        lines.append(f"{EACH_M} {place} = (n0 ? {place} : Real(0)) + flow{number}[m];")
    yield from braced("if (team.lane < rows)", lines)
    yield "team.sync();"
    if plan.fetches(path):
        yield "if (k0 + STEP < K) fetch_rows(k0 + STEP, n0);"
        yield "else if (n0 + TILE < N) fetch_rows(0, n0 + TILE);"


def one_pair_step(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """The same for a path of one pair, with ``z`` and ``d`` in registers; every lane gets the sum d."""
    wanted, offset = plan.products, plan.spec.problem.out[path.path.out].offset
    yield f"constexpr int N = {path.columns}, M = {path.dims[2]};"
    yield from (f"Real d{number}[M] = {{}};" for number in range(len(wanted.d)))
    read = [w for w, _ in wanted.value] + [w for sums in wanted.d for w, _ in sums]
    at = f"{path.path.weight_offset} + n"
    lines = [f"const Real this_{w} = {w}[{at}];" for w in dict.fromkeys(read)]
    element = f"{offset} + m * N + n"
    for w, pairs in wanted.value:
        lines.append(f"{EACH_M} o_g[{element}] += this_{w} * z{wanted.z.index(pairs)}[m];")
    lines += _weight_gradient(plan, at, "m", f"s_{{g}}[{element}]")
    for number, sums in enumerate(wanted.d):
        lines += [f"{EACH_M} d{number}[m] += this_{w} * s_{g}[{element}];" for w, g in sums]
    yield from braced("UNROLL EACH(n, N)", lines)
    yield from (f"{EACH_M} d{number}[m] = team.sum(d{number}[m]);" for number in range(len(wanted.d)))


# ---- one weight a pair, or none ------------------------------------------------------------------------------------


def _single(plan: PairPlan, path: PairPath) -> Iterator[str]:
    problem, wanted, p = plan.spec.problem, plan.products, path.path
    mul1, mul2, copies = path.muls
    block = problem.out[p.out]
    # Number of pairs that an output copy sums, the number of such a pair, and the copy that a pair belongs to.
    summed, number, copy = {
        "u": (mul2, f"o * {mul2} + s", f"k / {mul2}"),
        "v": (mul1, f"s * {mul2} + o", f"k % {mul2}"),
        "pair": (1, "o", "k"),
        "w": (path.pairs, "s", "0"),
    }[problem.mode(p).result]

    def times(w: str, rest: str) -> str:
        return f"{w}[{p.weight_offset} + k] * {rest}" if p.has_weight else rest

    yield f"constexpr int K = {path.pairs}, N = {copies}, M = {path.dims[2]};"
    row_of_g = f"{block.offset} + m * N"
    value = [(w, sums) for w, sums in wanted.value if p.has_weight or w == "w"]
    if value:
        terms = (times(w, f"z{wanted.z.index(sums)}[m * K + k]") for w, sums in value)
        lines = [f"const int k = {number};", *(f"{EACH_M} sums[m] += {term};" for term in terms)]
        summing = braced(f"for (int s = 0; s < {summed}; ++s)", lines)
        yield from braced("EACH(o, N)", ["Real sums[M] = {};", *summing, f"{EACH_M} o_g[{row_of_g} + o] += sums[m];"])
    at, g_at = f"{p.weight_offset} + k", f"s_{{g}}[{row_of_g} + {copy}]"
    lines = _weight_gradient(plan, at, "m * K + k", g_at) if p.has_weight else []
    for position, pairs in enumerate(wanted.d):
        kept = [(w, g) for w, g in pairs if p.has_weight or w == "w"]
        products = " + ".join(times(w, f"s_{g}[{row_of_g} + {copy}]") for w, g in kept) or "Real(0)"
        lines.append(f"{EACH_M} d{position}[m * K + k] = {products};")
    yield from braced("EACH(k, K)", lines)
