"""Kernels of symmetric contractions: schedules and spec, plan, and C++ text.

In: a spec. Out: a plan, or a ScheduleError with the broken limit; and the plan's source. There is a form for a GPU and
one for the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from kernelgen.arithmetic.contraction import ContractionDirection, Part, contraction_parts
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs, power_of_two_at_most
from kernelgen.kernels.product.emit import HEADER, ZEROS, zero_blocks, zero_lines
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import (
    BYTES,
    C_TYPES,
    INDENT,
    ORDER_OF_BLOCKS,
    braced,
    check_fields,
    gpu_entry,
    host_entry,
    indented,
    with_knobs,
)
from kernelgen.problem.other_kinds import ContractionProblem


@dataclass(frozen=True)
class ContractionSchedule(Knobs):
    """Base of the schedules of both backends.

    nodes_per_task: consecutive nodes that a worker takes, one after the other. Gradients of the weights are summed over
    them. 0, on a GPU: as few as let all tasks run at the same time.
    order: nodes as they are ``given``, or by ``element``, so that neighbours share weights. Rows of gradients of the
    weights need the latter.
    gradients: of the features and of all else by one walk over a part's values (``together``) or by two (``apart``).
    """

    nodes_per_task: int = 1
    order: str = "given"
    gradients: str = "together"


@dataclass(frozen=True)
class ContractionCudaSchedule(ContractionSchedule):
    """Knobs of a CUDA kernel: a thread has one channel of a task's nodes.

    block_size: threads of a block. min_blocks: registers are limited so that this many blocks fit on a multiprocessor
    (0: no limit). pace: warps of a block run ``free``, or wait for each other after each of the ``parts`` of the
    statements: these are thousands in a row, and so one fetch of instructions serves all warps. sums: where gradients
    of the weights are summed over a task's nodes: in ``registers`` or in ``memory``. adds: how a task's sums reach the
    gradient: by ``rows`` of their own, which are summed afterwards in a fixed order, or by ``atomic`` additions, which
    take no memory and have no fixed order (with sums in memory after each node). zeros: what is added to is zeroed
    ``apart``, by a launch before, or ``inside``, by the kernel's own first blocks.
    """

    block_size: int = 128
    min_blocks: int = 0
    pace: str = "free"
    sums: str = "registers"
    adds: str = "rows"
    zeros: str = "apart"

    backend: ClassVar[str] = "cuda"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nodes_per_task": (0, 1, 2, 4, 8, 16, 32, 64),
        "order": ("given", "element"),
        "gradients": ("together", "apart"),
        "block_size": (32, 64, 128, 256, 512),
        "min_blocks": (0, 1, 2, 3, 4, 5, 6, 8, 12, 16),
        "pace": ("free", "parts"),
        "sums": ("registers", "memory"),
        "adds": ("rows", "atomic"),
        "zeros": ("apart", "inside"),
    }
    younger: ClassVar[tuple[str, ...]] = ("adds", "zeros")

    @property
    def canonical(self) -> ContractionCudaSchedule:
        # A block of one warp waits for nothing.
        return dataclasses.replace(self, pace="free") if self.block_size == 32 else self


@dataclass(frozen=True)
class ContractionHostSchedule(ContractionSchedule):
    """Knobs of a host C++ kernel.

    channel_block: channels computed together with SIMD instructions.
    threads: most OpenMP threads, never more than torch's number; 0: by the amount of work, at most torch's number.
    """

    channel_block: int = 16
    threads: int = 0

    backend: ClassVar[str] = "cpu"
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {
        "nodes_per_task": (1, 2, 4, 8, 16, 32, 64),
        "order": ("given", "element"),
        "gradients": ("together", "apart"),
        "channel_block": (1, 2, 4, 8, 16, 32, 64),
        "threads": tuple(range(0, 257)),
    }


CONTRACTION_SCHEDULES: dict[str, type[ContractionSchedule]] = {
    "cuda": ContractionCudaSchedule,
    "cpu": ContractionHostSchedule,
}


def in_fixed_order(schedule: ContractionSchedule) -> ContractionSchedule:
    """The schedule, with no sum that depends on the order in which tasks run."""
    if isinstance(schedule, ContractionCudaSchedule) and schedule.adds == "atomic":
        return dataclasses.replace(schedule, nodes_per_task=0, order="element", adds="rows", zeros="apart")
    return schedule


@dataclass(frozen=True)
class ContractionSpec:
    """Everything that determines one kernel's source.

    layout: ``ir_mul``, features [nodes, dim_in, channels] and outputs [nodes, dim_out, channels]; or ``mul_ir``, as
    MACE has them: features [nodes, channels, dim_in], and outputs in e3nn's order, [channels, 2l+1] for each irrep.
    index: dtype of the nodes' elements. facts: the target device.
    """

    problem: ContractionProblem
    direction: ContractionDirection
    schedule: ContractionSchedule
    dtype: str
    layout: str
    index: str
    facts: DeviceFacts
    # What other kernels are stored and looked up by too.
    operation: ClassVar[str] = "contraction"
    deterministic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, ContractionSchedule):
            raise ScheduleError(f"the schedule is a {type(self.schedule).__name__}; expected a ContractionSchedule")
        check_fields(self)

    @property
    def row_work(self) -> int:
        """The work of a node, measured in elements of its features and output."""
        return 8 * self.problem.channels * (self.problem.dim_in + self.problem.dim_out)


# The plan of a kernel of a symmetric contraction, and its default schedule.
#
# The kernel takes the arguments of all kernels (``kernelgen.kernels.spec.BUFFERS``): features are ``x``, weights
# ``w`` [elements, weights, channels], cotangents of the output ``g``; ``tx``, ``tw`` are tangents, and gradients are
# ``out_x``, ``out_w``, ``out_g`` (the output itself too). ``sender`` has the element of each node, ``perm`` the nodes
# in the order of their elements. ``num_edges`` is the number of nodes, ``num_in`` that of a task (``task_nodes``).
#
# Tasks of consecutive nodes sum gradients of the weights in rows of their own, [tasks + elements, weights, channels]:
# task t has those of element e in row t + e. No two pairs (t, e) share a row, because neither decreases along the
# nodes in the order of their elements. Other rows are not written by a GPU. Rows are summed by element afterwards, in a
# fixed order, so no sum depends on the order of work. With ``adds=atomic`` there are no rows: tasks add to the gradient
# itself, [elements, weights, channels], which is zero before, or which the kernel zeroes (``zeros=inside``):
# ``num_out`` is the number of elements.


# More sums of weights' gradients than this a thread spill with what the statements hold (MACE's large has 196 bytes in
# float32, its medium in float64 232). Where they fit, sums in memory took 1.3 and 1.6 times as long on an H200.
MOST_SUMS_BYTES = {"backward": 256, "double_backward": 128}


@dataclass(frozen=True)
class ContractionPlan:
    """The statements for one node and channel, and the number of weights of an element and channel."""

    spec: ContractionSpec
    parts: tuple[Part, ...]
    weights: int
    # Fields of a product's plan.
    zeroed: frozenset[str] = frozenset()
    owner: str = ""
    partial_y: int = 0
    shared_bytes: int = 0

    @property
    def schedule(self) -> ContractionSchedule:
        return self.spec.schedule

    @property
    def sums_weights(self) -> bool:
        """Whether gradients of the weights are summed over nodes."""
        return self.spec.direction.name != "forward" and "w" in self.spec.direction.outputs

    @property
    def writes_zeros(self) -> bool:
        """Whether the kernel zeroes the gradient of the weights itself."""
        return isinstance(self.schedule, ContractionCudaSchedule) and self.schedule.zeros == "inside"

    @property
    def has_rows(self) -> bool:
        """Whether each task has rows of its own for these sums."""
        return self.sums_weights and getattr(self.schedule, "adds", "rows") == "rows"


def contraction_plan(spec: ContractionSpec) -> ContractionPlan:
    """The plan of a spec; ScheduleError with the broken limit.

    A kernel that adds to nothing gets ``zeros="apart"`` in the plan's own schedule.
    """
    schedule, facts = spec.schedule, spec.facts
    parts = contraction_parts(spec.problem, spec.direction, schedule.gradients == "apart")
    plan = ContractionPlan(spec, parts, len(polynomials(spec.problem)))
    if plan.has_rows and schedule.order != "element":
        raise ScheduleError("order='given' is not for rows of gradients of the weights; take order='element'")
    if isinstance(schedule, ContractionHostSchedule):
        facts.check_cores(schedule.threads)
    else:
        assert isinstance(schedule, ContractionCudaSchedule)
        facts.check_threads(schedule.block_size, schedule.min_blocks)
        if schedule.zeros == "inside" and facts.is_hip:
            raise ScheduleError(f"zeros={schedule.zeros!r} {ORDER_OF_BLOCKS}")
        if schedule.zeros == "inside" and not (plan.sums_weights and not plan.has_rows):
            plan = with_knobs(plan, zeros="apart")
    if plan.sums_weights and (facts.backend == "cpu" or not plan.has_rows):
        return dataclasses.replace(plan, zeroed=frozenset({"w"}))
    return plan


def task_nodes(plan: ContractionPlan, nodes: int, registers: int) -> int:
    """Nodes of a task. registers: of a thread of the compiled kernel, 0 if unknown.

    Without a number in the schedule: as few as let all tasks run at the same time, for each task of a GPU adds up a row
    of sums, and the last of several waves of blocks leaves multiprocessors idle.
    """
    schedule, facts = plan.schedule, plan.spec.facts
    if schedule.nodes_per_task:
        return schedule.nodes_per_task
    assert isinstance(schedule, ContractionCudaSchedule)
    # Registers are allocated to threads by eights.
    fit = min(facts.max_threads_per_unit, facts.registers_per_unit // (8 * -(-max(1, registers) // 8)))
    threads = facts.units * (fit // schedule.block_size * schedule.block_size)
    tasks = max(1, threads // plan.spec.problem.channels)
    return max(1, -(-nodes // tasks))


def default_contraction_schedule(
    problem: ContractionProblem, direction: ContractionDirection, dtype: str, facts: DeviceFacts
) -> ContractionSchedule:
    """A legal schedule by simple rules, without a search."""
    sums = direction.name != "forward" and "w" in direction.outputs
    if facts.backend == "cpu":
        lanes = facts.vector_bytes // BYTES[dtype]
        block = min(lanes, power_of_two_at_most(problem.channels))
        return ContractionHostSchedule(8 if sums else 1, "element" if sums else "given", channel_block=block)
    if not sums:
        return ContractionCudaSchedule()
    zeros = "apart" if facts.is_hip else "inside"
    # A double takes two registers.
    if len(polynomials(problem)) * BYTES[dtype] > MOST_SUMS_BYTES[direction.name]:
        # Sums in memory are added after each node, so longer tasks and neighbours of one element save nothing.
        return ContractionCudaSchedule(sums="memory", adds="atomic", zeros=zeros)
    # 0: tasks fill the device once.
    return ContractionCudaSchedule(0, "element", adds="atomic", zeros=zeros)


# The kernel's C++ text, for GPU and host.
#
# Both use the statements of ``kernelgen.arithmetic.contraction``. A thread of a GPU has one channel of a task's
# nodes; with ir_mul neighbouring threads access neighbouring elements. A host thread takes whole nodes, and vectors of
# channels; in mul_ir it changes the layout of these channels first.


def emit_contraction(plan: ContractionPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    on_gpu = isinstance(plan.schedule, ContractionCudaSchedule)
    lines = [*_preamble(plan), *(gpu_kernel(plan) if on_gpu else host_kernel(plan))]
    text = "\n".join(lines) + "\n"
    return Source(text, "cuda", GPU_ENTRY) if on_gpu else Source(text, "c++")


def contraction_launch(plan: ContractionPlan) -> LaunchRule:
    """A thread for each task and channel, after those that write zeros."""
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    share = Share("tasks", (schedule.block_size,), times=plan.spec.problem.channels)
    return LaunchRule(schedule.block_size, 0, (share,), zero_blocks(schedule.zeros, schedule.block_size))


def _preamble(plan: ContractionPlan) -> Iterator[str]:
    spec, problem = plan.spec, plan.spec.problem
    yield f"// problem    {problem.key}"
    yield f"// direction  {spec.direction.text}, {spec.dtype}, {spec.layout}, {spec.index} elements"
    # One text serves all numbers of nodes a task.
    on_gpu = isinstance(spec.schedule, ContractionCudaSchedule)
    schedule = dataclasses.replace(spec.schedule, nodes_per_task=1) if on_gpu else spec.schedule
    yield f"// schedule   {schedule.key}"
    yield f"using Real = {C_TYPES[spec.dtype]};"
    yield f"using index_t = {C_TYPES[spec.index]};"
    yield f"constexpr int DIM_IN = {problem.dim_in}, DIM_OUT = {problem.dim_out}, CHANNELS = {problem.channels};"
    yield f"constexpr int WEIGHTS = {plan.weights};"


# A GPU's kernel of a symmetric contraction: a thread has one channel of a task's nodes.

# Profilers tell contractions from products by it.
GPU_ENTRY = "equitune_contraction"
_PIECE_BYTES = 16


def _place(plan: ContractionPlan, buffer: str, number: int) -> str:
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


def gpu_kernel(plan: ContractionPlan) -> Iterator[str]:
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    yield "using V = Real;"
    if _is_packed(plan):
        yield f"struct alignas(16) Piece {{ Real part[{_PIECE_BYTES // BYTES[plan.spec.dtype]}]; }};"
    if plan.writes_zeros:
        yield from ("#define DEVICE __device__ __forceinline__", included(HEADER))
    more = ZEROS if plan.writes_zeros else ()
    yield from gpu_entry(schedule.block_size, schedule.min_blocks, *more, entry=GPU_ENTRY)
    block = "blockIdx.x"
    if plan.writes_zeros:
        blocks = zero_blocks(schedule.zeros, schedule.block_size)
        arrays = {"out_w": "num_out * (WEIGHTS * CHANNELS)"}
        yield from zero_lines(blocks, schedule.block_size, BYTES[plan.spec.dtype], arrays)
        yield f"{INDENT}const unsigned long long* const ready = ready_of(written);"
        yield f"{INDENT}ask_line(ready);"
        yield f"{INDENT}bool awaited = false;"
        block = f"(blockIdx.x - {blocks})"
    yield f"{INDENT}const long long thread = {block} * (long long){schedule.block_size} + threadIdx.x;"
    yield f"{INDENT}const long long task = thread / CHANNELS;"
    yield f"{INDENT}const int u = int(thread - task * CHANNELS);"
    keeps = plan.sums_weights and schedule.sums == "registers"
    if keeps or plan.has_rows:
        yield f"{INDENT}long long current = -1;"
    if keeps:
        yield f"{INDENT}V {', '.join(f'ow{r} = 0' for r in range(plan.weights))};"
    if schedule.pace == "parts":
        # Every thread runs to the end, so that all meet; those without a node compute the last one's and store nothing.
        head, find_node = (
            "for (long long k = 0; k < num_in; ++k)",
            [
                "const bool has_node = task * num_in + k < num_edges;",
                "const long long i = has_node ? task * num_in + k : num_edges - 1;",
            ],
        )
    else:
        yield f"{INDENT}const long long begin = task * num_in, end = min(begin + num_in, num_edges);"
        head, find_node = "for (long long i = begin; i < end; ++i)", []
    yield from indented(braced(head, [*find_node, *_gpu_node(plan)]))
    if keeps:
        yield from indented(braced("if (current >= 0)", _row(plan)))
    yield "}"


def _row(plan: ContractionPlan) -> Iterator[str]:
    """Write the sums of a task and an element to their row, or add them to the gradient."""
    yield _row_of(plan, "current")
    yield from _await_zeros(plan)
    statement = "row[{0} * CHANNELS] = ow{0};" if plan.has_rows else "atomicAdd(row + {0} * CHANNELS, ow{0});"
    yield from (statement.format(r) for r in range(plan.weights))


def _await_zeros(plan: ContractionPlan) -> list[str]:
    """What stands before sums that are added to the gradient."""
    return ["if (!awaited) await_zeros(ready, launch);", "awaited = true;"] if plan.writes_zeros else []


def _row_of(plan: ContractionPlan, element: str) -> str:
    place = f"(task + {element})" if plan.has_rows else element
    return f"Real* const row = out_w + {place} * (WEIGHTS * CHANNELS) + u;"


def _gpu_node(plan: ContractionPlan) -> Iterator[str]:
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    paced = schedule.pace == "parts"
    yield f"const long long node = {'perm[i]' if plan.schedule.order == 'element' else 'i'};"
    yield "const long long element = sender[node];"
    if plan.sums_weights and schedule.sums == "memory":
        yield _row_of(plan, "element")
        if plan.has_rows:
            yield "const bool is_new = element != current;"
            yield "current = element;"
            unused = set(range(plan.weights)) - set(names(plan, "ow"))
            guard = "has_node && " if paced else ""
            yield from (f"if ({guard}is_new) row[{r} * CHANNELS] = 0;" for r in sorted(unused))
    elif plan.sums_weights:
        clear = f"{' = '.join(f'ow{r}' for r in range(plan.weights))} = 0;"
        leave = braced("if (current >= 0)", _row(plan))
        head = f"if ({'has_node && ' if paced else ''}element != current)"
        yield from braced(head, [*leave, "current = element;", clear])
    for stem in ("x", "tx", "g"):
        yield from _loads(plan, stem, paced and plan.sums_weights)
    totals = list(sums_of(plan))
    if totals:
        yield f"V {', '.join(f'{stem}{i} = 0' for stem, _, i in totals)};"
    if plan.sums_weights and schedule.sums == "memory":
        yield from _await_zeros(plan)
    for part in plan.parts:
        yield from _gpu_part(plan, part, paced)
        if paced:
            yield "__syncthreads();"
    if totals:
        buffers = dict.fromkeys(buffer for _, buffer, _ in totals)
        stores = (line for buffer in buffers for line in _stores(plan, buffer, totals))
        yield from braced(f"if ({'has_node' if paced else 'true'})", stores)


def _gpu_part(plan: ContractionPlan, part: Part, paced: bool) -> Iterator[str]:
    """A part; with sums in memory also what it adds to them."""
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    added = part.uses("ow") if plan.sums_weights and schedule.sums == "memory" else []
    first = [f"V {', '.join(f'ow{r} = 0' for r in added)};"] if added else []
    # A weight is in one part alone.
    statement = "atomicAdd(row + {0} * CHANNELS, ow{0});"
    if plan.has_rows:
        statement = "row[{0} * CHANNELS] = ow{0} + (is_new ? Real(0) : row[{0} * CHANNELS]);"
    last = ["if (has_node) " * paced + statement.format(r) for r in added]
    return part_text(plan, part, "{buffer}[(element * WEIGHTS + {r}) * CHANNELS + u]", first, last)


def _is_packed(plan: ContractionPlan) -> bool:
    """Whether a thread reads and writes its features, which lie next to each other, by pieces of 16 bytes."""
    in_row = plan.spec.problem.dim_in * BYTES[plan.spec.dtype] % _PIECE_BYTES == 0
    return plan.spec.layout == "mul_ir" and in_row


def _loads(plan: ContractionPlan, stem: str, guarded: bool) -> Iterator[str]:
    """A node's values of an operand. guarded: cotangents are 0 for threads without a node, whose sums must not grow."""
    numbers = names(plan, stem)
    if not numbers:
        return
    if stem == "g" or not _is_packed(plan):
        guard = "has_node ? {} : Real(0)" if guarded and stem == "g" else "{}"
        yield from (f"const V {stem}{i} = {guard.format(_place(plan, stem, i))};" for i in numbers)
        return
    width = _PIECE_BYTES // BYTES[plan.spec.dtype]
    yield f"const Piece* const {stem}_row = reinterpret_cast<const Piece*>(&{_place(plan, stem, 0)});"
    pieces = sorted({i // width for i in numbers})
    yield from (f"const Piece {stem}_piece{piece} = {stem}_row[{piece}];" for piece in pieces)
    yield from (f"const V {stem}{i} = {stem}_piece{i // width}.part[{i % width}];" for i in numbers)


def _stores(plan: ContractionPlan, buffer: str, totals: list[tuple[str, str, int]]) -> Iterator[str]:
    """Write a node's values of an output."""
    names = [f"{stem}{i}" for stem, at, i in totals if at == buffer]
    if buffer == "out_g" or not _is_packed(plan):
        yield from (f"{_place(plan, buffer, i)} = {name};" for i, name in enumerate(names))
        return
    width = _PIECE_BYTES // BYTES[plan.spec.dtype]
    yield f"Piece* const row = reinterpret_cast<Piece*>(&{_place(plan, buffer, 0)});"
    for piece in range(len(names) // width):
        yield f"row[{piece}] = Piece{{{', '.join(names[piece * width : (piece + 1) * width])}}};"


# A host's kernel of a symmetric contraction: a thread takes whole nodes, with vectors of channels.


def host_kernel(plan: ContractionPlan) -> Iterator[str]:
    schedule = plan.schedule
    assert isinstance(schedule, ContractionHostSchedule)
    yield "#include <omp.h>"
    yield included("host_vectors.hpp")
    yield "namespace {"
    yield "using equitune::add, equitune::Block, equitune::change_layout, equitune::load, equitune::store;"
    yield "// What a node has."
    yield from braced("struct Rows", ["const Real *x, *tx, *g, *w, *tw;", "Real *out_x, *out_g, *out_w;"], end="};")
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
    lines: list[str] = []
    if turns:
        lines += [f"Real {name}[{_dim(name)} * N];" for name in (*operands, *outs)]
        lines += [line for name in operands for line in _turned(plan, name)]
    for stem in operands:
        lines += [f"const V {stem}{i} = load<V>({place.format(buffer=stem, i=i)});" for i in names(plan, stem)]
    lines += [f"V {stem}{i}{{}};" for stem, _, i in totals]
    for part in plan.parts:
        added = part.uses("ow") if plan.sums_weights else []
        sums = [f"V ow{r}{{}};" for r in added]
        adds = [f"add(rows.out_w + {r} * CHANNELS + u, ow{r});" for r in added]
        lines += part_text(plan, part, "load<V>(rows.{buffer} + {r} * CHANNELS + u)", sums, adds)
    lines += [f"store({place.format(buffer=buffer, i=i)}, {stem}{i});" for stem, buffer, i in totals]
    if turns:
        lines += [line for name in outs for line in _turned(plan, name)]
    yield "template <class V, int N>"
    yield from braced("EQUITUNE_NOINLINE void channels(const Rows& rows, int u)", lines)


def _turned(plan: ContractionPlan, name: str) -> Iterator[str]:
    """Change the layout of N channels of a node's row, block by block; all features are one block."""
    problem, is_out = plan.spec.problem, name.startswith("out_")
    blocks = [(0, problem.dim_in)] if name.endswith("x") else [(block.offset, block.dim) for block in problem.out]
    for offset, dim in blocks:
        row, here = f"rows.{name} + {offset} * CHANNELS + u * {dim}", f"{name} + {offset} * N"
        places = f"{here}, {row}" if is_out else f"{row}, {here}"
        yield f"change_layout<{'false' if is_out else 'true'}, false, Block<0, {dim}, N>>({places});"


def _walk(plan: ContractionPlan) -> Iterator[str]:
    """The loop over tasks and nodes."""
    yield from host_entry()
    yield f"{INDENT}const long long tasks = (num_edges + num_in - 1) / num_in;"
    yield "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads > 0 ? threads : omp_get_max_threads())"
    stop = "const long long stop = (task + 1) * num_in, end = stop < num_edges ? stop : num_edges;"
    nodes = braced("for (long long i = task * num_in; i < end; ++i)", _host_node(plan))
    yield from indented(braced("for (long long task = 0; task < tasks; ++task)", [stop, *nodes]))
    yield "}"


def _dim(name: str) -> str:
    return "DIM_IN" if name.endswith("x") else "DIM_OUT"


def _host_node(plan: ContractionPlan) -> Iterator[str]:
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


# What the kernels of both backends have in common: the parts of the statements and the sums that these add to.


def names(plan: ContractionPlan, stem: str) -> list[int]:
    """Numbers of a stem's names in all parts."""
    return sorted({number for part in plan.parts for number in part.uses(stem)})


def sums_of(plan: ContractionPlan) -> Iterator[tuple[str, str, int]]:
    """Stem, buffer and number of every sum but those of weights; zero if no statement adds to it."""
    outputs, problem = plan.spec.direction.outputs, plan.spec.problem
    forward = plan.spec.direction.name == "forward"
    if "g" in outputs:
        yield from (("y" if forward else "og", "out_g", o) for o in range(problem.dim_out))
    if "x" in outputs:
        yield from (("ox", "out_x", i) for i in range(problem.dim_in))


def part_text(
    plan: ContractionPlan, part: Part, weight: str, first: Iterable[str], last: Iterable[str]
) -> Iterator[str]:
    """A part in its scope. weight: the place of weight {r} in the buffer {buffer}. first, last: more statements."""
    loads = (f"const V {stem}{r} = {weight.format(buffer=stem, r=r)};" for stem in ("w", "tw") for r in part.uses(stem))
    yield from (f"{{  // {part.title}", *indented([*first, *loads, *part.statements, *last]), "}")
