"""A kernel of a symmetric contraction as C++ text, for GPU and host.

Both use the statements of ``kernelgen.terms.contraction_statements``. A thread of a GPU has one channel of a task's
nodes; with ir_mul neighbouring threads access neighbouring elements. A host thread takes whole nodes, and vectors of
channels; in mul_ir it changes the layout of these channels first.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.emit.signature import gpu_entry, host_entry
from kernelgen.emit.source import Emitter, Source, included
from kernelgen.plan.symmetric_contraction import ContractionPlan
from kernelgen.schedule.symmetric_contraction import ContractionCudaSchedule, ContractionHostSchedule
from kernelgen.terms.contraction_statements import Part

INDENT = "    "
C_TYPES = {"float32": "float", "float64": "double"}
INDICES = {"int32": "int", "int64": "long long"}


def emit_contraction(plan: ContractionPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    on_gpu = isinstance(plan.schedule, ContractionCudaSchedule)
    lines = [*_preamble(plan), *(_gpu(plan) if on_gpu else _host(plan))]
    return Source("\n".join(lines) + "\n", "cuda" if on_gpu else "c++")


def contraction_geometry(plan: ContractionPlan, num_nodes: int, num_in: int, num_out: int) -> tuple[int, int, int]:
    """Blocks, threads a block, and dynamic shared memory in bytes."""
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    tasks = -(-num_nodes // schedule.nodes_per_task)
    return -(-tasks * plan.spec.problem.channels // schedule.block_size), schedule.block_size, 0


def _preamble(plan: ContractionPlan) -> Iterator[str]:
    spec, problem = plan.spec, plan.spec.problem
    yield f"// problem    {problem.key}"
    yield f"// direction  {spec.direction.text}, {spec.dtype}, {spec.layout}, {spec.index} elements"
    yield f"// schedule   {spec.schedule.key}"
    yield f"using Real = {C_TYPES[spec.dtype]};"
    yield f"using index_t = {INDICES[spec.index]};"
    yield f"constexpr int DIM_IN = {problem.dim_in}, DIM_OUT = {problem.dim_out}, CHANNELS = {problem.channels};"
    yield f"constexpr int WEIGHTS = {plan.weights}, NODES = {spec.schedule.nodes_per_task};"


def _names(plan: ContractionPlan, stem: str) -> list[int]:
    """Numbers of a stem's names in all parts."""
    return sorted({number for part in plan.parts for number in part.uses(stem)})


def _sums(plan: ContractionPlan) -> Iterator[tuple[str, str, int]]:
    """Stem, buffer and number of every sum but those of weights; zero if no statement adds to it."""
    outputs, problem = plan.spec.direction.outputs, plan.spec.problem
    forward = plan.spec.direction.name == "forward"
    if "g" in outputs:
        yield from (("y" if forward else "og", "out_g", o) for o in range(problem.dim_out))
    if "x" in outputs:
        yield from (("ox", "out_x", i) for i in range(problem.dim_in))


def _part(plan: ContractionPlan, part: Part, weight: str) -> Iterator[str]:
    """A part in its scope. weight: the place of weight {r} in the buffer {buffer}."""
    yield f"{{  // {part.title}"
    for stem in ("w", "tw"):
        yield from (f"{INDENT}const V {stem}{r} = {weight.format(buffer=stem, r=r)};" for r in part.uses(stem))
    yield from (f"{INDENT}{statement}" for statement in part.statements)
    yield "}"


# ---- GPU


def _gpu_place(plan: ContractionPlan, buffer: str, number: int) -> str:
    """The element of a node's features (``x``, ``tx``, ``out_x``) or output (``g``, ``out_g``)."""
    problem, by_component = plan.spec.problem, plan.spec.layout == "ir_mul"
    if buffer.endswith("x"):
        at = f"{number} * CHANNELS + u" if by_component else f"u * DIM_IN + {number}"
        return f"{buffer}[node * (DIM_IN * CHANNELS) + {at}]"
    block = next(one for one in problem.out if number < one.offset + one.dim)
    at = f"{number} * CHANNELS + u"
    if not by_component:
        at = f"{block.offset} * CHANNELS + u * {block.dim} + {number - block.offset}"
    return f"{buffer}[node * (DIM_OUT * CHANNELS) + {at}]"


def _gpu(plan: ContractionPlan) -> Iterator[str]:
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    yield "using V = Real;"
    yield from gpu_entry(schedule.block_size, schedule.min_blocks)
    yield f"{INDENT}const long long thread = blockIdx.x * (long long){schedule.block_size} + threadIdx.x;"
    yield f"{INDENT}const long long task = thread / CHANNELS;"
    yield f"{INDENT}const int u = int(thread - task * CHANNELS);"
    yield f"{INDENT}const long long begin = task * NODES, end = min(begin + NODES, num_edges);"
    sums = range(plan.weights) if plan.sums_weights else []
    if sums:
        yield f"{INDENT}long long current = -1;"
        yield f"{INDENT}V {', '.join(f'ow{r} = 0' for r in sums)};"
    yield f"{INDENT}for (long long i = begin; i < end; ++i) {{"
    yield from (f"{INDENT * 2}{line}" for line in _gpu_node(plan))
    yield f"{INDENT}}}"
    if sums:
        yield f"{INDENT}if (current >= 0) {{"
        yield from (f"{INDENT * 2}{line}" for line in _gpu_row(plan))
        yield f"{INDENT}}}"
    yield "}"


def _gpu_row(plan: ContractionPlan) -> Iterator[str]:
    """Write the sums of a task and an element to their row."""
    yield "Real* const row = out_w + (task + current) * (WEIGHTS * CHANNELS) + u;"
    yield from (f"row[{r} * CHANNELS] = ow{r};" for r in range(plan.weights))


def _gpu_node(plan: ContractionPlan) -> Iterator[str]:
    yield f"const long long node = {'perm[i]' if plan.schedule.order == 'element' else 'i'};"
    yield "const long long element = sender[node];"
    if plan.sums_weights:
        yield "if (element != current) {"
        yield f"{INDENT}if (current >= 0) {{"
        yield from (f"{INDENT * 2}{line}" for line in _gpu_row(plan))
        yield f"{INDENT}}}"
        yield f"{INDENT}current = element;"
        yield f"{INDENT}{' = '.join(f'ow{r}' for r in range(plan.weights))} = 0;"
        yield "}"
    for stem in ("x", "tx", "g"):
        yield from (f"const V {stem}{i} = {_gpu_place(plan, stem, i)};" for i in _names(plan, stem))
    totals = list(_sums(plan))
    if totals:
        yield f"V {', '.join(f'{stem}{i} = 0' for stem, _, i in totals)};"
    for part in plan.parts:
        yield from _part(plan, part, "{buffer}[(element * WEIGHTS + {r}) * CHANNELS + u]")
    yield from (f"{_gpu_place(plan, buffer, i)} = {stem}{i};" for stem, buffer, i in totals)


# ---- Host


def _host(plan: ContractionPlan) -> Iterator[str]:
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
    yield from _host_channels(plan)
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
    yield from _host_walk(plan)


def _host_channels(plan: ContractionPlan) -> Iterator[str]:
    """The function for N channels from u on, a vector V of them for each component."""
    totals = list(_sums(plan))
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
        for i in _names(plan, stem):
            yield f"{INDENT}const V {stem}{i} = load<V>({place.format(buffer=stem, i=i)});"
    yield from (f"{INDENT}V {stem}{i}{{}};" for stem, _, i in totals)
    for part in plan.parts:
        yield from (f"{INDENT}{line}" for line in _host_part(plan, part))
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


def _host_part(plan: ContractionPlan, part: Part) -> Iterator[str]:
    *lines, end = _part(plan, part, "load<V>(rows.{buffer} + {r} * CHANNELS + u)")
    yield from lines[:1]
    if plan.sums_weights:
        yield from (f"{INDENT}V ow{r}{{}};" for r in part.uses("ow"))
    yield from lines[1:]
    if plan.sums_weights:
        yield from (f"{INDENT}add(rows.out_w + {r} * CHANNELS + u, ow{r});" for r in part.uses("ow"))
    yield end


def _host_walk(plan: ContractionPlan) -> Iterator[str]:
    """The loop over tasks and nodes."""
    yield from host_entry()
    yield f"{INDENT}const long long tasks = (num_edges + NODES - 1) / NODES;"
    yield "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads > 0 ? threads : omp_get_max_threads())"
    yield f"{INDENT}for (long long task = 0; task < tasks; ++task) {{"
    yield f"{INDENT * 2}const long long stop = (task + 1) * NODES, end = stop < num_edges ? stop : num_edges;"
    yield f"{INDENT * 2}for (long long i = task * NODES; i < end; ++i) {{"
    yield from (f"{INDENT * 3}{line}" for line in _host_node(plan))
    yield f"{INDENT * 2}}}"
    yield f"{INDENT}}}"
    yield "}"


def _dim(name: str) -> str:
    return "DIM_IN" if name.endswith("x") else "DIM_OUT"


def _host_node(plan: ContractionPlan) -> Iterator[str]:
    by_element = plan.schedule.order == "element"
    outs = dict.fromkeys(buffer for _, buffer, _ in _sums(plan))
    yield f"const long long row = {'static_cast<const int*>(perm)[i]' if by_element else 'i'};"
    yield "const long long element = static_cast<const index_t*>(sender)[row];"
    yield "Rows rows{};"
    for name in (*plan.spec.direction.operands, *outs):
        step = "element * (WEIGHTS * CHANNELS)" if name.endswith("w") else f"row * ({_dim(name)} * CHANNELS)"
        yield f"rows.{name} = static_cast<{'' if name in outs else 'const '}Real*>({name}) + {step};"
    if plan.sums_weights:
        yield "rows.out_w = static_cast<Real*>(out_w) + (task + element) * (WEIGHTS * CHANNELS);"
    yield "node(rows);"


EMITTERS = {ContractionPlan: Emitter(emit_contraction, contraction_geometry)}
