"""The kernel of a :class:`PairPlan` as C++ text, for GPU and host.

A team processes an edge: it loads rows of operands to its scratch memory; then each path computes its pairs, multiplies
them by weights and adds to the sums. Formulas are in ``kernelgen.plan.pairs``, the steps of a path in
``kernelgen.emit.pairs.path_steps``, differences between a warp and a host thread in ``include/pairs.hpp``.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.emit.launch import LaunchRule, Share
from kernelgen.emit.pairs.path_steps import path_steps
from kernelgen.emit.signature import buffers_line, buffers_struct, element, gpu_entry, host_entry
from kernelgen.emit.source import Source, included
from kernelgen.plan.pairs import WARP, PairPath, PairPlan
from kernelgen.problem.irreps import Block
from kernelgen.schedule.kernel_spec import BUFFERS
from kernelgen.schedule.tensor_product import CudaSchedule
from kernelgen.terms.clebsch_gordan import path_terms

INDENT = "    "
SIDES = {"x": "in1", "g": "out"}


def emit_pairs(plan: PairPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    entry = _gpu(plan) if plan.on_gpu else _host(plan)
    parts = [_preamble(plan), included("pairs.hpp"), buffers_struct(), *_edge(plan), *entry]
    return Source("\n".join(parts) + "\n", "cuda" if plan.on_gpu else "c++")


def pair_launch(plan: PairPlan) -> LaunchRule:
    """A team for each part of each edge."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    share = Share("edges", (plan.teams,), times=len(plan.parts))
    # Each block adds its sums to memory once, so launch only as many blocks as the device runs at a time.
    most = max(1, plan.spec.facts.shared_per_block // plan.shared_bytes) if plan.weight_sums else 0
    return LaunchRule(schedule.block_size, plan.shared_bytes, (share,), most_of_unit=most)


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
        f"constexpr int LANES = {plan.lanes};",
    ]
    index = {"int32": "int", "int64": "long long"}[spec.index]
    return "\n".join([*lines, f"using index_t = {index};"])


def _edge(plan: PairPlan) -> Iterator[str]:
    """The function for an edge, or one for each part of an edge."""
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
    if plan.is_direct:
        yield from _rows_of_pairs(plan)
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


def _rows_of_pairs(plan: PairPlan) -> Iterator[str]:
    """Pointers to the edge's rows ``g``, ``tg`` and ``out_g``, for pairs that access them directly."""
    size, direction = plan.spec.problem.dim_out, plan.spec.direction
    for name in direction.operands:
        if name[-1] == "g":
            yield f"const Real* const __restrict__ {name} = b.{name} + edge * {size};"
    if "g" in direction.live_outputs:
        yield f"Real* const __restrict__ out_g = b.out_g + edge * {size};"


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
    schedule, sums = plan.spec.schedule, plan.weight_sums
    assert isinstance(schedule, CudaSchedule)
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
        yield from (f"{INDENT}{line}" for line in _shares(plan, head, arguments))
        yield f"{INDENT}__syncthreads();"
        yield f"{INDENT}for (int i = threadIdx.x; i < {sums}; i += {schedule.block_size}) add_to(b.out_w + i, sums[i]);"
    else:
        yield f"{INDENT}const long long i = first;"
        yield from (f"{INDENT}{line}" for line in _shares(plan, f"if ({_any_left(plan)})", arguments))
    yield "}"


def _any_left(plan: PairPlan) -> str:
    """The condition that some team of the warp still has an edge or a part of one."""
    warp = "i" if plan.lanes == WARP else f"i - team_index % {WARP // plan.lanes}"
    return f"{warp} < num_edges * {len(plan.parts)}"


def _shares(plan: PairPlan, head: str, arguments: str) -> Iterator[str]:
    """The work of team i: edge i, or one part of an edge that it shares with neighbouring teams."""
    count = len(plan.parts)
    yield f"{head} {{"
    if plan.lanes == WARP:
        yield f"{INDENT}const long long edge = i{f' / {count}' if count > 1 else ''};"
    else:
        yield f"{INDENT}team.active = i < num_edges;"
        yield f"{INDENT}const long long edge = team.active ? i : num_edges - 1;"
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
