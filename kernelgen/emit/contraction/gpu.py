"""A GPU's kernel of a symmetric contraction: a thread has one channel of a task's nodes."""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.emit.contraction.parts import INDENT, names, part_text, sums_of
from kernelgen.emit.cuda.zero_blocks import HEADER, ZEROS, zero_blocks, zero_lines
from kernelgen.emit.signature import gpu_entry
from kernelgen.emit.source import included
from kernelgen.plan.symmetric_contraction import ContractionPlan
from kernelgen.schedule.kernel_spec import BYTES
from kernelgen.schedule.symmetric_contraction import ContractionCudaSchedule
from kernelgen.terms.contraction_statements import Part

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
        yield f"{INDENT}for (long long k = 0; k < num_in; ++k) {{"
        yield f"{INDENT * 2}const bool has_node = task * num_in + k < num_edges;"
        yield f"{INDENT * 2}const long long i = has_node ? task * num_in + k : num_edges - 1;"
    else:
        yield f"{INDENT}const long long begin = task * num_in, end = min(begin + num_in, num_edges);"
        yield f"{INDENT}for (long long i = begin; i < end; ++i) {{"
    yield from (f"{INDENT * 2}{line}" for line in _node(plan))
    yield f"{INDENT}}}"
    if keeps:
        yield f"{INDENT}if (current >= 0) {{"
        yield from (f"{INDENT * 2}{line}" for line in _row(plan))
        yield f"{INDENT}}}"
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


def _node(plan: ContractionPlan) -> Iterator[str]:
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
        yield f"if ({'has_node && ' if paced else ''}element != current) {{"
        yield f"{INDENT}if (current >= 0) {{"
        yield from (f"{INDENT * 2}{line}" for line in _row(plan))
        yield f"{INDENT}}}"
        yield f"{INDENT}current = element;"
        yield f"{INDENT}{' = '.join(f'ow{r}' for r in range(plan.weights))} = 0;"
        yield "}"
    for stem in ("x", "tx", "g"):
        yield from _loads(plan, stem, paced and plan.sums_weights)
    totals = list(sums_of(plan))
    if totals:
        yield f"V {', '.join(f'{stem}{i} = 0' for stem, _, i in totals)};"
    if plan.sums_weights and schedule.sums == "memory":
        yield from _await_zeros(plan)
    for part in plan.parts:
        yield from _part(plan, part, paced)
        if paced:
            yield "__syncthreads();"
    if totals:
        yield f"if ({'has_node' if paced else 'true'}) {{"
        for buffer in dict.fromkeys(buffer for _, buffer, _ in totals):
            yield from (f"{INDENT}{line}" for line in _stores(plan, buffer, totals))
        yield "}"


def _part(plan: ContractionPlan, part: Part, paced: bool) -> Iterator[str]:
    """A part; with sums in memory also what it adds to them."""
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    first, *lines, end = part_text(plan, part, "{buffer}[(element * WEIGHTS + {r}) * CHANNELS + u]")
    added = part.uses("ow") if plan.sums_weights and schedule.sums == "memory" else []
    yield first
    if added:
        yield f"{INDENT}V {', '.join(f'ow{r} = 0' for r in added)};"
    yield from lines
    if added:
        guard = "if (has_node) " if paced else ""
        # A weight is in one part alone.
        statement = "atomicAdd(row + {0} * CHANNELS, ow{0});"
        if plan.has_rows:
            statement = "row[{0} * CHANNELS] = ow{0} + (is_new ? Real(0) : row[{0} * CHANNELS]);"
        yield from (f"{INDENT}{guard}{statement.format(r)}" for r in added)
    yield end


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
