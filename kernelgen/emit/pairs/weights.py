"""The step of a path that combines pairs with weights, as C++ text: values, gradients of weights, and ``d``.

A path with a weight for every pair and copy of the output is a small matrix product: lanes take columns of the matrix
(and several rows if there are fewer columns than lanes), so that each weight is read once, in memory order. All other
paths have one weight a pair, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.plan.pairs import PairPath, PairPlan

INDENT = "    "


def weight_step(plan: PairPlan, path: PairPath) -> list[str]:
    """What a path adds to ``o_g``, ``out_w`` and ``d``."""
    return list(_dense(plan, path) if plan.is_dense(path) else _single(plan, path))


def _put_weight(plan: PairPlan, at: str, value: str) -> str:
    if plan.spec.problem.shared_weights:
        return f"if (team.active) add_to(out_w + {at}, {value});"
    return f"if (team.active) out_w[{at}] = {value};"


# ---- a weight for every pair and copy of the output ---------------------------------------------------------------


def first_weights(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """Start the copy of a path's first weights before its pairs are computed, if the plan fetches them."""
    if plan.fetches(path):
        yield from _sizes(plan, path)
        yield from _fetch_function(plan, path)
        yield "fetch_rows(0, 0);"


def _dense(plan: PairPlan, path: PairPath) -> Iterator[str]:
    if not plan.fetches(path):
        yield from _sizes(plan, path)
    tile, columns = plan.tile(path), min(plan.tile(path), plan.lanes)
    whole = tile % columns == 0 and path.columns % tile == 0
    inside = "true" if whole else "n < min(N, n0 + TILE)"
    row_of_g = f"{plan.spec.problem.out[path.path.out].offset} + m * N"
    yield "for (int n0 = 0; n0 < N; n0 += TILE) {"
    yield from (f"{INDENT}{line}" for line in _tile_lines(plan, path, row_of_g, inside))
    yield "}"


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
    wanted = plan.products
    if wanted.value:
        yield "Real sums[M][TILES] = {};"
    for g, _ in wanted.weight:
        yield f"Real own_{g}[M][TILES] = {{}};"
        yield "UNROLL for (int m = 0; m < M; ++m) UNROLL for (int i = 0; i < TILES; ++i) {"
        yield f"{INDENT}const int n = n0 + col + COLS * i;"
        yield f"{INDENT}if (row < ROWS && {inside}) own_{g}[m][i] = s_{g}[{row_of_g} + n];"
        yield "}"
    yield "for (int k0 = 0; k0 < K; k0 += STEP) {"
    yield f"{INDENT}const int rows = min(STEP, K - k0);"
    elements = list(_element_lines(plan, path))
    yield from (f"{INDENT}{line}" for line in (_over_elements(elements, inside) if elements else ()))
    if wanted.d:
        yield from (f"{INDENT}{line}" for line in _flow_lines(plan, path))
    yield "}"
    if wanted.value:
        yield "UNROLL for (int m = 0; m < M; ++m) UNROLL for (int i = 0; i < TILES; ++i) {"
        yield f"{INDENT}const int n = n0 + col + COLS * i;"
        yield f"{INDENT}const Real total = sum_rows<ROWS, COLS>(team, sums[m][i]);"
        yield f"{INDENT}if (row == 0 && {inside}) o_g[{row_of_g} + n] += total;"
        yield "}"


def _over_elements(lines: list[str], inside: str) -> Iterator[str]:
    """``lines`` for each current row and each column of the tile."""
    yield "if (row < ROWS) SOME_ROWS for (int kk = row; kk < rows; kk += ROWS) {"
    yield f"{INDENT}const int k = k0 + kk;"
    yield f"{INDENT}UNROLL for (int i = 0; i < TILES; ++i) {{"
    yield f"{INDENT * 2}const int n = n0 + col + COLS * i;"
    yield f"{INDENT * 2}if (!({inside})) continue;"
    yield from (f"{INDENT * 2}{line}" for line in lines)
    yield f"{INDENT}}}"
    yield "}"


def _weights_of_d(plan: PairPlan) -> list[str]:
    return list(dict.fromkeys(w for sums in plan.products.d for w, _ in sums))


def _fetch_function(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """``fetch_rows(k0, n0)``: starts the copy of the weights of STEP rows and a tile of columns."""
    at = f"{path.path.weight_offset} + (k0 + kk) * N + n0 + n"
    yield "const auto fetch_rows = [&](int k0, int n0) {"
    yield f"{INDENT}const int rows = min(STEP, K - k0), width = min(TILE, N - n0);"
    yield f"{INDENT}if (row < ROWS) SOME_ROWS for (int kk = row; kk < rows; kk += ROWS)"
    yield f"{INDENT * 2}UNROLL for (int i = 0; i < TILES; ++i) {{"
    yield f"{INDENT * 3}const int n = col + COLS * i;"
    for w in _weights_of_d(plan):
        yield f"{INDENT * 3}if (n < width) fetch(c_{w} + kk * {plan.stride(path)} + n, {w} + {at});"
    yield f"{INDENT * 2}}}"
    yield "};"


def _element_lines(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """Statements for the weight of pair k and column n."""
    wanted, kept = plan.products, [] if plan.fetches(path) else _weights_of_d(plan)
    read = [w for w, _ in wanted.value] + kept
    at = f"{path.path.weight_offset} + k * N + n"
    for w in dict.fromkeys(read):
        yield f"const Real this_{w} = {w}[{at}];"
    for w, sums in wanted.value:
        z = f"z{wanted.z.index(sums)}"
        yield f"UNROLL for (int m = 0; m < M; ++m) sums[m][i] += this_{w} * {z}[m * K + k];"
    if wanted.weight:
        products = " + ".join(f"z{wanted.z.index(sums)}[m * K + k] * own_{g}[m][i]" for g, sums in wanted.weight)
        yield "Real gradient = 0;"
        yield f"UNROLL for (int m = 0; m < M; ++m) gradient += {products};"
        yield _put_weight(plan, at, "gradient")
    for w in kept:
        yield f"c_{w}[kk * {plan.stride(path)} + n - n0] = this_{w};"


def _flow_lines(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """``d`` of the current rows, one row a lane, from the weights in scratch memory."""
    stride, block = plan.stride(path), plan.spec.problem.out[path.path.out]
    yield "await_fetched(team);" if plan.fetches(path) else "team.sync();"
    yield "if (team.lane < rows) {"
    for number, sums in enumerate(plan.products.d):
        yield f"{INDENT}Real flow{number}[M] = {{}};"
        for w, g in sums:
            rows = f"c_{w} + team.lane * {stride}, s_{g} + {block.offset} + n0, min(TILE, N - n0)"
            yield f"{INDENT}meet<M, N>({rows}, flow{number});"
        place = f"d{number}[m * K + k0 + team.lane]"
        yield f"{INDENT}UNROLL for (int m = 0; m < M; ++m) {place} = (n0 ? {place} : Real(0)) + flow{number}[m];"
    yield "}"
    yield "team.sync();"
    if plan.fetches(path):
        yield "if (k0 + STEP < K) fetch_rows(k0 + STEP, n0);"
        yield "else if (n0 + TILE < N) fetch_rows(0, n0 + TILE);"


def one_pair_step(plan: PairPlan, path: PairPath) -> Iterator[str]:
    """The same for a path of one pair, with ``z`` and ``d`` in registers; every lane gets the sum d."""
    wanted, offset = plan.products, plan.spec.problem.out[path.path.out].offset
    yield f"constexpr int N = {path.columns}, M = {path.dims[2]};"
    yield from (f"Real d{number}[M] = {{}};" for number in range(len(wanted.d)))
    yield "UNROLL EACH(n, N) {"
    read = [w for w, _ in wanted.value] + [w for sums in wanted.d for w, _ in sums]
    at = f"{path.path.weight_offset} + n"
    lines = [f"const Real this_{w} = {w}[{at}];" for w in dict.fromkeys(read)]
    each = "UNROLL for (int m = 0; m < M; ++m)"
    element = f"{offset} + m * N + n"
    for w, pairs in wanted.value:
        lines.append(f"{each} o_g[{element}] += this_{w} * z{wanted.z.index(pairs)}[m];")
    if wanted.weight:
        products = " + ".join(f"z{wanted.z.index(pairs)}[m] * s_{g}[{element}]" for g, pairs in wanted.weight)
        lines += ["Real gradient = 0;", f"{each} gradient += {products};", _put_weight(plan, at, "gradient")]
    for number, sums in enumerate(wanted.d):
        lines += [f"{each} d{number}[m] += this_{w} * s_{g}[{element}];" for w, g in sums]
    yield from (f"{INDENT}{line}" for line in lines)
    yield "}"
    yield from (f"{each} d{number}[m] = team.sum(d{number}[m]);" for number in range(len(wanted.d)))


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
        yield "EACH(o, N) {"
        yield f"{INDENT}Real sums[M] = {{}};"
        yield f"{INDENT}for (int s = 0; s < {summed}; ++s) {{"
        yield f"{INDENT * 2}const int k = {number};"
        for w, sums in value:
            product = times(w, f"z{wanted.z.index(sums)}[m * K + k]")
            yield f"{INDENT * 2}UNROLL for (int m = 0; m < M; ++m) sums[m] += {product};"
        yield f"{INDENT}}}"
        yield f"{INDENT}UNROLL for (int m = 0; m < M; ++m) o_g[{row_of_g} + o] += sums[m];"
        yield "}"
    yield "EACH(k, K) {"
    if wanted.weight and p.has_weight:
        products = " + ".join(
            f"z{wanted.z.index(sums)}[m * K + k] * s_{g}[{row_of_g} + {copy}]" for g, sums in wanted.weight
        )
        yield f"{INDENT}Real gradient = 0;"
        yield f"{INDENT}UNROLL for (int m = 0; m < M; ++m) gradient += {products};"
        yield f"{INDENT}" + _put_weight(plan, f"{p.weight_offset} + k", "gradient")
    for position, pairs in enumerate(wanted.d):
        kept = [(w, g) for w, g in pairs if p.has_weight or w == "w"]
        products = " + ".join(times(w, f"s_{g}[{row_of_g} + {copy}]") for w, g in kept) or "Real(0)"
        yield f"{INDENT}UNROLL for (int m = 0; m < M; ++m) d{position}[m * K + k] = {products};"
    yield "}"
