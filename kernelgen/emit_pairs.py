"""A kernel of pairs as C++ text, for the GPU and the host alike: a :class:`PairPlan` enters, the source leaves.

A team takes an edge: rows of operands go to its scratch memory, then each path forms its pairs, meets its weights and
adds to the sums (``kernelgen.pairs`` has the formulas, ``kernelgen.pair_weights`` the middle step). What differs
between a warp and a thread is in ``include/pairs.hpp``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import resources

from kernelgen.pair_weights import weight_step
from kernelgen.pairs import WARP, PairPath, PairPlan
from kernelgen.problem import Block
from kernelgen.schedule import CudaSchedule
from kernelgen.signature import buffers_struct, element, gpu_entry, host_entry
from kernelgen.source import Source
from kernelgen.spec import BUFFERS
from kernelgen.terms import PathTerms, path_terms

INDENT = "    "
# What is done with one pair.
Body = Callable[[PairPlan, PairPath, PathTerms], Iterator[str]]
SIDES = {"x": "in1", "g": "out"}


@functools.cache
def _header() -> str:
    return resources.files("kernelgen").joinpath("include/pairs.hpp").read_text()


def emit_pairs(plan: PairPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    parts = [_preamble(plan), _header(), buffers_struct(), *_edge(plan), *(_gpu(plan) if plan.on_gpu else _host(plan))]
    return Source("\n".join(parts) + "\n", "cuda" if plan.on_gpu else "c++")


def pair_geometry(plan: PairPlan, num_edges: int) -> tuple[int, int, int]:
    """Blocks, threads a block, and dynamic shared memory in bytes."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    blocks = -(-num_edges * len(plan.parts) // (schedule.block_size // WARP))
    if plan.weight_sums:
        # Each block adds its sums to memory once, so no more blocks than the device runs at a time.
        facts = plan.spec.facts
        blocks = min(blocks, facts.units * max(1, facts.shared_per_block // plan.shared_bytes))
    return blocks, schedule.block_size, plan.shared_bytes


def _preamble(plan: PairPlan) -> str:
    spec = plan.spec
    real = {"float32": "float", "float64": "double"}[spec.dtype]
    lines = [
        f"// problem    {spec.problem.key}",
        f"// direction  {spec.direction.text}",
        f"// operation  {spec.operation}, {spec.dtype}, {spec.layout}",
        f"// schedule   {spec.schedule.key}",
        *(["#define ON_GPU"] if plan.on_gpu else ["#include <omp.h>", "#include <cstdint>", "#include <vector>"]),
        f"using Real = {real};",
        f"constexpr bool MUL_IR = {'true' if spec.layout == 'mul_ir' else 'false'};",
    ]
    index = {"int32": "int", "int64": "long long"}[spec.index]
    return "\n".join([*lines, f"using index_t = {index};"])


def _edge(plan: PairPlan) -> Iterator[str]:
    """The function of one edge, or of each part of one."""
    out_w = ", Real* const out_w" if "w" in plan.spec.direction.live_outputs else ""
    for number, part in enumerate(plan.parts):
        yield (
            f"DEVICE void {_function(plan, number)}(const Buffers& b, const Team& team, const long long edge, "
            f"Real* const scratch{out_w})"
        )
        yield "{"
        yield from (f"{INDENT}{line}" for line in _edge_lines(plan, part))
        yield "}"
        yield ""


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
    yield from _load_rows(plan, part)
    for slot in direction.live_outputs.replace("w", ""):
        size = {"x": problem.dim_in1, "y": problem.dim_in2, "g": problem.dim_out}[slot]
        yield f"clear_row<{size}>(team, o_{slot});"
    yield "team.sync();"
    terms = path_terms(problem)
    for path in part:
        yield from _path(plan, path, terms[path.path.index])
    yield from _store_rows(plan, part)


def _blocks(plan: PairPlan, part: tuple[PairPath, ...], slot: str) -> Iterator[Block]:
    """Blocks of x or g: all of them, or those of one of several parts."""
    side = SIDES[slot]
    used = {getattr(path.path, side) for path in part}
    for number, block in enumerate(getattr(plan.spec.problem, side)):
        if len(plan.parts) == 1 or number in used:
            yield block


def _load_rows(plan: PairPlan, part: tuple[PairPath, ...]) -> Iterator[str]:
    problem = plan.spec.problem
    for name in plan.spec.direction.operands:
        if name[-1] == "y":
            yield f"copy_row<{problem.dim_in2}>(team, b.{name} + edge * {problem.dim_in2}, s_{name});"
        elif name[-1] in SIDES:
            size = problem.dim_in1 if name[-1] == "x" else problem.dim_out
            row = _row(plan, name[-1])
            for block in _blocks(plan, part, name[-1]):
                where = f"b.{name} + {row} * {size} + {block.offset}, s_{name} + {block.offset}"
                yield f"load_block<{block.dim}, {block.mul}>(team, {where});"


def _row(plan: PairPlan, slot: str) -> str:
    """Of x or g: the edge's own, or that of the node at its end."""
    if not plan.is_conv:
        return "edge"
    return {"x": "(long long)b.sender[edge]", "g": "(long long)b.receiver[edge]"}[slot]


def _store_rows(plan: PairPlan, part: tuple[PairPath, ...]) -> Iterator[str]:
    problem, shared = plan.spec.problem, len(plan.parts) > 1
    for slot in plan.spec.direction.live_outputs.replace("w", ""):
        if slot == "y":
            how = "add" if shared else "copy"
            yield f"{how}_row<{problem.dim_in2}>(team, o_y, b.out_y + edge * {problem.dim_in2});"
            continue
        size = problem.dim_in1 if slot == "x" else problem.dim_out
        row, how = _row(plan, slot), "add" if plan.is_conv or shared else "store"
        for block in _blocks(plan, part, slot):
            where = f"o_{slot} + {block.offset}, b.out_{slot} + {row} * {size} + {block.offset}"
            yield f"{how}_block<{block.dim}, {block.mul}>(team, {where});"
    yield "team.sync();"


def _path(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    problem, p, wanted = plan.spec.problem, path.path, plan.products
    texts = f"{problem.in1[p.in1].text} x {problem.in2[p.in2].text} -> {problem.out[p.out].text}"
    yield f"{{  // path {p.index}, {p.mode}: {texts}"
    lines: list[str] = []
    if wanted.z:
        lines += [*_over_pairs(plan, path, terms, _z_lines, {y for sums in wanted.z for _, y in sums}), "team.sync();"]
    lines += [*weight_step(plan, path), "team.sync();"]
    if wanted.d:
        # Sums may lie in another lane than the values that they were made of.
        lines += [*_over_pairs(plan, path, terms, _gradient_lines, {y for y, _ in wanted.x}), "team.sync();"]
    yield from (f"{INDENT}{line}" for line in lines)
    yield "}"


def _over_pairs(plan: PairPlan, path: PairPath, terms: PathTerms, body: Body, y_buffers: set[str]) -> Iterator[str]:
    """A loop over the pairs k = (u, v) of a path: lanes over u, and the edge values of the y buffers at v."""
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
    """Signed products as one expression."""
    text = "".join(f" {'-' if sign < 0 else '+'} {product}" for sign, product in products)
    return text[3:] if text.startswith(" + ") else f"-{text[3:]}" if text else "Real(0)"


def _z_lines(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    yield from _rows_of_x(plan, path, {x for sums in plan.products.z for x, _ in sums})
    for number, sums in enumerate(plan.products.z):
        for m3 in range(terms.dim3):
            products = [
                (entry.sign, f"{_prefix(y)}m_{entry.value} * {x}_{entry.m1}")
                for x, y in sums
                for entry in terms.entries
                if entry.m3 == m3
            ]
            yield f"z{number}[{m3 * path.pairs} + k] = {_sum(products)};"


def _gradient_lines(plan: PairPlan, path: PairPath, terms: PathTerms) -> Iterator[str]:
    """From d to the gradients of x (added to its row) and of the edge values (``r_1``, summed over u)."""
    block, wanted = plan.spec.problem.in1[path.path.in1], plan.products
    for number in range(len(wanted.d)):
        yield from (f"const Real d{number}_{m3} = d{number}[{m3 * path.pairs} + k];" for m3 in range(terms.dim3))
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
    """The transpose of the edge values: to the components of copy v; ``together``: every lane has a part of r."""
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


def _weight_row(plan: PairPlan, shared: str) -> str:
    """The argument for gradients of weights: a row an edge, or the sums of all edges that a worker takes."""
    if "w" not in plan.spec.direction.live_outputs:
        return ""
    return f", {shared}" if plan.sums_weights else f", b.out_w + edge * {plan.spec.problem.weight_numel}"


def _gpu(plan: PairPlan) -> Iterator[str]:
    schedule, sums = plan.spec.schedule, plan.weight_sums
    assert isinstance(schedule, CudaSchedule)
    teams, size = schedule.block_size // WARP, plan.scratch["end"]
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield f"{INDENT}const Buffers b = {{{', '.join(BUFFERS)}}};"
    yield f"{INDENT}extern __shared__ __align__(16) unsigned char shared_bytes[];"
    yield f"{INDENT}Real* const shared = reinterpret_cast<Real*>(shared_bytes);"
    yield f"{INDENT}const int team_index = threadIdx.x / LANES;"
    yield f"{INDENT}const Team team{{int(threadIdx.x % LANES)}};"
    yield f"{INDENT}const long long first = blockIdx.x * {teams}ll + team_index;"
    arguments = f"(b, team, edge, shared + team_index * {size}{_weight_row(plan, 'sums' if sums else 'b.out_w')});"
    if sums:
        yield f"{INDENT}Real* const sums = shared + {teams * size};"
        yield f"{INDENT}for (int i = threadIdx.x; i < {sums}; i += {schedule.block_size}) sums[i] = Real(0);"
        yield f"{INDENT}__syncthreads();"
        head = f"for (long long i = first; i < num_edges * {len(plan.parts)}; i += gridDim.x * {teams}ll)"
        yield from (f"{INDENT}{line}" for line in _shares(plan, head, arguments))
        yield f"{INDENT}__syncthreads();"
        yield f"{INDENT}for (int i = threadIdx.x; i < {sums}; i += {schedule.block_size}) add_to(b.out_w + i, sums[i]);"
    else:
        yield f"{INDENT}const long long i = first;"
        yield from (f"{INDENT}{line}" for line in _shares(plan, f"if (i < num_edges * {len(plan.parts)})", arguments))
    yield "}"


def _shares(plan: PairPlan, head: str, arguments: str) -> Iterator[str]:
    """What team i does: all of edge i, or one part of an edge that the teams next to it share."""
    count = len(plan.parts)
    yield f"{head} {{"
    yield f"{INDENT}const long long edge = i{f' / {count}' if count > 1 else ''};"
    for number in range(count):
        last = number + 1 == count
        test = "" if last else f"if (i % {count} == {number}) "
        yield f"{INDENT}{'else ' if number else ''}{test}{_function(plan, number)}{arguments}"
    yield "}"


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
