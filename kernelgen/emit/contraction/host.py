"""A host's kernel of a symmetric contraction: a thread takes whole nodes, with vectors of channels."""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.emit.contraction.parts import INDENT, names, part_text, sums_of
from kernelgen.emit.signature import host_entry
from kernelgen.emit.source import included
from kernelgen.plan.symmetric_contraction import ContractionPlan
from kernelgen.schedule.symmetric_contraction import ContractionHostSchedule
from kernelgen.terms.contraction_statements import Part


def host_kernel(plan: ContractionPlan) -> Iterator[str]:
    schedule = plan.schedule
    assert isinstance(schedule, ContractionHostSchedule)
    operands = [name for name in plan.spec.direction.operands if name not in ("w", "tw")]
    outs = list(dict.fromkeys(buffer for _, buffer, _ in sums_of(plan)))
    yield from map(included, ("host_vectors.hpp", "contraction_host.hpp"))
    yield "namespace {"
    yield "using equitune::add, equitune::lanes, equitune::load, equitune::store;"
    yield "struct Rows {"
    yield f"{INDENT}const Real *x, *tx, *g, *w, *tw;"
    yield f"{INDENT}Real *out_x, *out_g, *out_w;"
    yield "};"
    yield "template <class V>"
    yield "EQUITUNE_NOINLINE void channels(const Rows& rows, int u) {"
    for stem in ("x", "tx", "g"):
        for i in names(plan, rf"(?<![a-z]){stem}"):
            yield f"{INDENT}const V {stem}{i} = load<V>(rows.{stem} + {i} * CHANNELS + u);"
    yield from (f"{INDENT}V {stem}{i}{{}};" for stem, _, i in sums_of(plan))
    for part in plan.parts:
        yield from (f"{INDENT}{line}" for line in _part(plan, part))
    for stem, buffer, i in sums_of(plan):
        yield f"{INDENT}store(rows.{buffer} + {i} * CHANNELS + u, {stem}{i});"
    yield "}"
    yield "inline void node(const Rows& rows) {"
    yield f"{INDENT}int u = 0;"
    width = schedule.channel_block
    while width:
        if width >= 4 or width == 1:
            kind = "Real" if width == 1 else f"equitune::Vec<Real, {width}>"
            yield f"{INDENT}for (; u + {width} <= CHANNELS; u += {width}) channels<{kind}>(rows, u);"
        width //= 2
    yield "}"
    yield "}  // namespace"
    yield from _walk(plan, operands, outs)


def _part(plan: ContractionPlan, part: Part) -> Iterator[str]:
    *lines, end = part_text(plan, part, "load<V>(rows.{buffer} + {r} * CHANNELS + u)")
    yield from lines[:1]
    if plan.sums_weights:
        yield from (f"{INDENT}V ow{r}{{}};" for r in part.uses("ow"))
    yield from lines[1:]
    if plan.sums_weights:
        yield from (f"{INDENT}add(rows.out_w + {r} * CHANNELS + u, ow{r});" for r in part.uses("ow"))
    yield end


def _walk(plan: ContractionPlan, operands: list[str], outs: list[str]) -> Iterator[str]:
    """The loop over tasks and nodes; rows in mul_ir pass through ``turned``."""
    turns = plan.spec.layout == "mul_ir"
    yield from host_entry()
    yield f"{INDENT}const long long tasks = (num_edges + NODES - 1) / NODES;"
    yield "#pragma omp parallel num_threads(threads > 0 ? threads : omp_get_max_threads())"
    yield f"{INDENT}{{"
    if turns:
        yield from (
            f"{INDENT * 2}alignas(64) static thread_local Real turned_{name}[{_row(name)}];"
            for name in (*operands, *outs)
        )
    yield "#pragma omp for schedule(dynamic, 1)"
    yield f"{INDENT * 2}for (long long task = 0; task < tasks; ++task) {{"
    yield f"{INDENT * 3}const long long stop = (task + 1) * NODES, end = stop < num_edges ? stop : num_edges;"
    yield f"{INDENT * 3}for (long long i = task * NODES; i < end; ++i) {{"
    yield from (f"{INDENT * 4}{line}" for line in _node(plan, operands, outs, turns))
    yield f"{INDENT * 3}}}"
    yield f"{INDENT * 2}}}"
    yield f"{INDENT}}}"
    yield "}"


def _row(name: str) -> str:
    return ("DIM_IN" if name.endswith("x") else "DIM_OUT") + " * CHANNELS"


def _node(plan: ContractionPlan, operands: list[str], outs: list[str], turns: bool) -> Iterator[str]:
    by_element = plan.schedule.order == "element"
    yield f"const long long node_number = {'static_cast<const int*>(perm)[i]' if by_element else 'i'};"
    yield "const long long element = static_cast<const index_t*>(sender)[node_number];"
    yield "Rows rows{};"
    for name in ("w", "tw"):
        if name in plan.spec.direction.operands:
            yield f"rows.{name} = static_cast<const Real*>({name}) + element * (WEIGHTS * CHANNELS);"
    for name in operands:
        place = f"static_cast<const Real*>({name}) + node_number * ({_row(name)})"
        if turns:
            yield from (f"{call};" for call in _turn(plan, name, place, f"turned_{name}"))
        yield f"rows.{name} = {f'turned_{name}' if turns else place};"
    for name in outs:
        place = f"static_cast<Real*>({name}) + node_number * ({_row(name)})"
        yield f"rows.{name} = {f'turned_{name}' if turns else place};"
    if plan.sums_weights:
        yield "rows.out_w = static_cast<Real*>(out_w) + (task + element) * (WEIGHTS * CHANNELS);"
    yield "node(rows);"
    if turns:
        for name in outs:
            place = f"static_cast<Real*>({name}) + node_number * ({_row(name)})"
            yield from (f"{call};" for call in _turn(plan, name, f"turned_{name}", place))


def _turn(plan: ContractionPlan, name: str, source: str, target: str) -> Iterator[str]:
    way = "by_channel" if name.startswith("out_") else "by_component"
    if name.endswith("x"):
        yield f"{way}({source}, {target})"
        return
    for block in plan.spec.problem.out:
        yield f"block_{way}<{block.offset}, {block.dim}>({source}, {target})"
