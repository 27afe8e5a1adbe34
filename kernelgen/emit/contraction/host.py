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
    yield "#include <omp.h>"
    yield included("host_vectors.hpp")
    yield "namespace {"
    yield "using equitune::add, equitune::Block, equitune::change_layout, equitune::load, equitune::store;"
    yield "// What a node has."
    yield "struct Rows {"
    yield f"{INDENT}const Real *x, *tx, *g, *w, *tw;"
    yield f"{INDENT}Real *out_x, *out_g, *out_w;"
    yield "};"
    yield from _channels(plan)
    yield "inline void node(const Rows& rows) {"
    begin, width, channels = 0, schedule.channel_block, plan.spec.problem.channels
    while begin < channels:
        end = channels - (channels - begin) % width
        if end > begin:
            kind = "Real" if width == 1 else f"equitune::Vec<Real, {width}>"
            yield f"{INDENT}for (int u = {begin}; u < {end}; u += {width}) channels<{kind}, {width}>(rows, u);"
        begin, width = end, width // 2
    yield "}"
    yield "}  // namespace"
    yield from _walk(plan)


def _channels(plan: ContractionPlan) -> Iterator[str]:
    """The function for N channels from u on, a vector V of them for each component."""
    totals = list(sums_of(plan))
    outs = list(dict.fromkeys(buffer for _, buffer, _ in totals))
    operands = [name for name in plan.spec.direction.operands if name not in ("w", "tw")]
    turns = plan.spec.layout == "mul_ir"
    place = "{buffer} + {i} * N" if turns else "rows.{buffer} + {i} * CHANNELS + u"
    yield "template <class V, int N>"
    yield "EQUITUNE_NOINLINE void channels(const Rows& rows, int u) {"
    if turns:
        yield from (f"{INDENT}Real {name}[{_dim(name)} * N];" for name in (*operands, *outs))
        yield from (f"{INDENT}{line}" for name in operands for line in _turned(plan, name))
    for stem in operands:
        for i in names(plan, stem):
            yield f"{INDENT}const V {stem}{i} = load<V>({place.format(buffer=stem, i=i)});"
    yield from (f"{INDENT}V {stem}{i}{{}};" for stem, _, i in totals)
    for part in plan.parts:
        yield from (f"{INDENT}{line}" for line in _part(plan, part))
    for stem, buffer, i in totals:
        yield f"{INDENT}store({place.format(buffer=buffer, i=i)}, {stem}{i});"
    if turns:
        yield from (f"{INDENT}{line}" for name in outs for line in _turned(plan, name))
    yield "}"


def _turned(plan: ContractionPlan, name: str) -> Iterator[str]:
    """Change the layout of N channels of a node's row, block by block; all features are one block."""
    problem, is_out = plan.spec.problem, name.startswith("out_")
    blocks = [(0, problem.dim_in)] if name.endswith("x") else [(block.offset, block.dim) for block in problem.out]
    for offset, dim in blocks:
        row, here = f"rows.{name} + {offset} * CHANNELS + u * {dim}", f"{name} + {offset} * N"
        places = f"{here}, {row}" if is_out else f"{row}, {here}"
        yield f"change_layout<{'false' if is_out else 'true'}, false, Block<0, {dim}, N>>({places});"


def _part(plan: ContractionPlan, part: Part) -> Iterator[str]:
    *lines, end = part_text(plan, part, "load<V>(rows.{buffer} + {r} * CHANNELS + u)")
    yield from lines[:1]
    if plan.sums_weights:
        yield from (f"{INDENT}V ow{r}{{}};" for r in part.uses("ow"))
    yield from lines[1:]
    if plan.sums_weights:
        yield from (f"{INDENT}add(rows.out_w + {r} * CHANNELS + u, ow{r});" for r in part.uses("ow"))
    yield end


def _walk(plan: ContractionPlan) -> Iterator[str]:
    """The loop over tasks and nodes."""
    yield from host_entry()
    yield f"{INDENT}const long long tasks = (num_edges + num_in - 1) / num_in;"
    yield "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads > 0 ? threads : omp_get_max_threads())"
    yield f"{INDENT}for (long long task = 0; task < tasks; ++task) {{"
    yield f"{INDENT * 2}const long long stop = (task + 1) * num_in, end = stop < num_edges ? stop : num_edges;"
    yield f"{INDENT * 2}for (long long i = task * num_in; i < end; ++i) {{"
    yield from (f"{INDENT * 3}{line}" for line in _node(plan))
    yield f"{INDENT * 2}}}"
    yield f"{INDENT}}}"
    yield "}"


def _dim(name: str) -> str:
    return "DIM_IN" if name.endswith("x") else "DIM_OUT"


def _node(plan: ContractionPlan) -> Iterator[str]:
    by_element = plan.schedule.order == "element"
    outs = dict.fromkeys(buffer for _, buffer, _ in sums_of(plan))
    yield f"const long long row = {'static_cast<const int*>(perm)[i]' if by_element else 'i'};"
    yield "const long long element = static_cast<const index_t*>(sender)[row];"
    yield "Rows rows{};"
    for name in (*plan.spec.direction.operands, *outs):
        step = "element * (WEIGHTS * CHANNELS)" if name.endswith("w") else f"row * ({_dim(name)} * CHANNELS)"
        yield f"rows.{name} = static_cast<{'' if name in outs else 'const '}Real*>({name}) + {step};"
    if plan.sums_weights:
        yield "rows.out_w = static_cast<Real*>(out_w) + (task + element) * (WEIGHTS * CHANNELS);"
    yield "node(rows);"
