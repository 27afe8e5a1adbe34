"""Products whose paths pair channels of the same number (mode ``uuu``): a thread has a channel of an edge in registers.

Supported: plain products on an NVIDIA GPU, all paths of mode ``uuu``, every block of the same multiplicity, a multiple
of 32; and a channel of both inputs and the output has at most 80 components, which registers hold. So a warp has 32
neighbouring channels of one edge. Other products of such paths take a team an edge (``plan``).

1. A thread reads its channel of all operands: where components lie apart (``ir_mul``) each by itself, where a channel's
   lie together (``mul_ir``, and always y) the warp's part of a block through shared memory, in the order of memory.
2. Path by path it forms the edge values of y and adds the products to its channel of the outputs, see ``plan``.
3. It writes the outputs as it read the operands. Gradients of shared weights stay in registers while the thread goes
   from edge to edge, and are added up in shared memory, then in memory.

Knobs: ``block_size`` and ``min_blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelgen.arithmetic.couplings import PathTerms, path_terms
from kernelgen.errors import ScheduleError
from kernelgen.kernels.pairs.emit import gradient_of_value, gradient_of_x, heading, pair
from kernelgen.kernels.pairs.plan import WARP, Products, check_block, products
from kernelgen.kernels.source import LaunchRule, Share, Source
from kernelgen.kernels.spec import (
    BYTES,
    C_TYPES,
    Spec,
    braced,
    buffers_line,
    buffers_struct,
    gpu_entry,
    indented,
)
from kernelgen.problem.irreps import Block
from kernelgen.problem.product import Path

# In float32 no direction spills with 48 (Allegro-OAM-L); second derivatives do with 75.
_MOST_COMPONENTS = 80
# A multiprocessor's blocks where each adds its sums of weights' gradients to memory.
_MOST_BLOCKS = 8
# Sums of weights' gradients in shared memory, in bytes; more are added to memory by each thread.
_MOST_SUMS = 24576
SYNC = "__syncwarp(0xffffffffu);"


def channels_of(spec: Spec) -> int:
    """The multiplicity of all blocks, if it is such a product; else 0."""
    problem, facts = spec.problem, spec.facts
    if spec.operation != "plain" or facts.backend != "cuda" or facts.is_hip or not problem.paths:
        return 0
    blocks = (*problem.in1, *problem.in2, *problem.out)
    is_one = len({block.mul for block in blocks}) == 1 and all(path.mode == "uuu" for path in problem.paths)
    fits = is_one and blocks[0].mul <= 1024 and sum(block.dim for block in blocks) <= _MOST_COMPONENTS
    return blocks[0].mul if fits and blocks[0].mul % WARP == 0 else 0


@dataclass(frozen=True)
class ChannelPlan:
    """zeroed: of the outputs. sums: whether gradients of shared weights are added up in shared memory."""

    spec: Spec
    mul: int
    products: Products
    zeroed: frozenset[str]
    sums: bool
    owner: str = ""
    partial_y: int = 0

    @property
    def widest(self) -> int:
        """Most components of a block."""
        problem = self.spec.problem
        return max(block.dim for block in (*problem.in1, *problem.in2, *problem.out))

    @property
    def shared_bytes(self) -> int:
        elements = self.spec.cuda.block_size * self.widest + self.sums * self.spec.problem.weight_numel
        return elements * BYTES[self.spec.dtype]


def channel_plan(spec: Spec) -> ChannelPlan:
    """The plan of a spec with channels, or ScheduleError with the broken limit."""
    schedule, problem = spec.cuda, spec.problem
    for knob in ("path_groups", "edges_per_warp"):
        if (value := getattr(schedule, knob)) != 1:
            raise ScheduleError(f"{knob}={value}: a product of equal channels has a thread for each; expected 1")
    summed = problem.shared_weights and "w" in spec.direction.live_outputs
    in_shared = summed and problem.weight_numel * BYTES[spec.dtype] <= _MOST_SUMS
    zeroed = frozenset({"out_w"} if summed else ())
    plan = ChannelPlan(spec, channels_of(spec), products(spec.direction), zeroed, in_shared)
    check_block(spec, plan.shared_bytes)
    return plan


def channel_launch(plan: ChannelPlan) -> LaunchRule:
    """A thread for each channel of each edge."""
    share = Share("edges", (plan.spec.cuda.block_size,), times=plan.mul)
    return LaunchRule(
        plan.spec.cuda.block_size, plan.shared_bytes, (share,), most_of_unit=_MOST_BLOCKS if plan.zeroed else 0
    )


def emit_channels(plan: ChannelPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    spec = plan.spec
    head = [
        *heading(spec),
        f"using Real = {C_TYPES[spec.dtype]};",
        f"using index_t = {C_TYPES[spec.index]};",
        buffers_struct(),
    ]
    schedule = spec.cuda
    entry = gpu_entry(schedule.block_size, schedule.min_blocks)
    return Source("\n".join([*head, *entry, *indented(_kernel(plan)), "}"]) + "\n", "cuda")


def _kernel(plan: ChannelPlan) -> Iterator[str]:
    problem, threads = plan.spec.problem, plan.spec.cuda.block_size
    yield buffers_line().strip()
    yield "extern __shared__ __align__(16) unsigned char shared_bytes[];"
    yield "Real* const shared = reinterpret_cast<Real*>(shared_bytes);"
    yield "const int lane = threadIdx.x % 32;"
    yield f"Real* const part = shared + threadIdx.x / 32 * {WARP * plan.widest};"
    yield f"const long long first = blockIdx.x * {threads}ll + threadIdx.x;"
    yield f"const long long step = gridDim.x * {threads}ll / {plan.mul};"
    yield f"const int u = first % {plan.mul};"
    if plan.zeroed:
        yield from (f"Real sum_{path.index} = 0;" for path in _weighted(plan))
    if plan.sums:
        yield f"Real* const sums = shared + {threads * plan.widest};"
        yield f"for (int i = threadIdx.x; i < {problem.weight_numel}; i += {threads}) sums[i] = 0;"
        yield "__syncthreads();"
    # The step covers whole edges: threads beyond them have none.
    head = f"if (first / {plan.mul} < step) for (long long edge = first / {plan.mul}; edge < num_edges; edge += step)"
    yield from braced(head, [*_loads(plan), *_paths(plan), *_stores(plan)])
    if plan.zeroed:
        target = "sums" if plan.sums else "b.out_w"
        yield from (f"atomicAdd({target} + {p.weight_offset} + u, sum_{p.index});" for p in _weighted(plan))
    if plan.sums:
        yield "__syncthreads();"
        each = f"for (int i = threadIdx.x; i < {problem.weight_numel}; i += {threads})"
        yield f"{each} atomicAdd(b.out_w + i, sums[i]);"


def _weighted(plan: ChannelPlan) -> list[Path]:
    return [path for path in plan.spec.problem.paths if path.has_weight]


def _blocks(plan: ChannelPlan, slot: str) -> tuple[Block, ...]:
    problem = plan.spec.problem
    return {"x": problem.in1, "y": problem.in2, "g": problem.out}[slot]


def _begin(plan: ChannelPlan, slot: str, number: int) -> int:
    """Of a block, its first component among a channel's."""
    return _blocks(plan, slot)[number].offset // plan.mul


def _size(plan: ChannelPlan, slot: str) -> int:
    problem = plan.spec.problem
    return {"x": problem.dim_in1, "y": problem.dim_in2, "g": problem.dim_out}[slot]


def _is_staged(plan: ChannelPlan, slot: str, block: Block) -> bool:
    """Whether a channel's components lie together, so that a warp reads and writes them through shared memory."""
    return block.dim > 1 and (slot == "y" or plan.spec.layout == "mul_ir")


def _row(plan: ChannelPlan, buffer: str, slot: str, block: Block) -> tuple[str, list[str]]:
    """A pointer to a thread's first element of a block, and all its elements in the order of memory."""
    is_staged, kind = _is_staged(plan, slot, block), "Real" if buffer.startswith("out_") else "const Real"
    first, apart = (f"(u - lane) * {block.dim} + lane", WARP) if is_staged else ("u", block.mul)
    name = f"{buffer}_{block.offset // plan.mul}_"
    declared = f"{kind}* const {name} = b.{buffer} + edge * {_size(plan, slot)} + {block.offset} + {first};"
    return declared, [f"{name}[{m * apart}]" for m in range(block.dim)]


def _loads(plan: ChannelPlan) -> Iterator[str]:
    """``x_0``, ``ty_3``: the thread's channel of each operand; ``w_2``: its weights of each path."""
    row = "" if plan.spec.problem.shared_weights else f"edge * {plan.spec.problem.weight_numel} + "
    for name in plan.spec.direction.operands:
        slot = name[-1]
        if slot == "w":
            yield from (f"const Real {name}_{p.index} = b.{name}[{row}{p.weight_offset} + u];" for p in _weighted(plan))
            continue
        for number, block in enumerate(_blocks(plan, slot)):
            declared, elements = _row(plan, name, slot, block)
            yield declared
            if _is_staged(plan, slot, block):
                copies = (f"part[{WARP * m} + lane] = {element};" for m, element in enumerate(elements))
                yield from (SYNC, *copies, SYNC)
                elements = [f"part[lane * {block.dim} + {m}]" for m in range(block.dim)]
            for m, element in enumerate(elements, _begin(plan, slot, number)):
                yield f"const Real {name}_{m} = {element};"


def _stores(plan: ChannelPlan) -> Iterator[str]:
    for slot in plan.spec.direction.live_outputs.replace("w", ""):
        for number, block in enumerate(_blocks(plan, slot)):
            declared, elements = _row(plan, f"out_{slot}", slot, block)
            begin = _begin(plan, slot, number)
            values = [f"o_{slot}_{begin + m}" for m in range(block.dim)]
            yield declared
            if _is_staged(plan, slot, block):
                puts = (f"part[lane * {block.dim} + {m}] = {value};" for m, value in enumerate(values))
                yield from (SYNC, *puts, SYNC)
                values = [f"part[{WARP * m} + lane]" for m in range(block.dim)]
            yield from (f"{element} = {value};" for element, value in zip(elements, values, strict=True))


def _paths(plan: ChannelPlan) -> Iterator[str]:
    """The outputs of all paths: ``o_x_0``, and sums or rows of the gradients of weights."""
    for slot in plan.spec.direction.live_outputs.replace("w", ""):
        names = (f"o_{slot}_{i} = 0" for i in range(_size(plan, slot) // plan.mul))
        yield f"Real {', '.join(names)};"
    for terms in path_terms(plan.spec.problem):
        yield from braced("", _path(plan, terms.path, terms))


def _path(plan: ChannelPlan, path: Path, terms: PathTerms) -> Iterator[str]:
    """One path by the three steps of ``plan``: pairs z, values and d, gradients."""
    wanted, block = plan.products, plan.spec.problem.in2[path.in2]
    begin = {slot: _begin(plan, slot, number) for slot, number in (("x", path.in1), ("y", path.in2), ("g", path.out))}

    def times(w: str, rest: str) -> str:
        return f"{w}_{path.index} * {rest}" if path.has_weight else rest

    def is_there(w: str) -> bool:  # a tangent of weights that the path has not is zero
        return path.has_weight or w == "w"

    for buffer in sorted({y for sums in wanted.z for _, y in sums} | {y for y, _ in wanted.x}):
        for number, value in enumerate(terms.values):
            each = (f"Real({c!r}) * {buffer}_{begin['y'] + m - block.offset}" for m, c in value.terms)
            yield f"const Real {buffer[:-1]}m_{number} = {' + '.join(each)};"
    for number, sums in enumerate(wanted.z):
        for m3 in range(terms.dim3):
            yield f"const Real z{number}_{m3} = {pair(sums, terms, m3, begin['x'])};"
    for w, sums in wanted.value:
        for m3 in range(terms.dim3) if is_there(w) else ():
            yield f"o_g_{begin['g'] + m3} += {times(w, f'z{wanted.z.index(sums)}_{m3}')};"
    if wanted.weight and path.has_weight:
        found = (
            f"z{wanted.z.index(sums)}_{m3} * {g}_{begin['g'] + m3}"
            for g, sums in wanted.weight
            for m3 in range(terms.dim3)
        )
        row = f"b.out_w[edge * {plan.spec.problem.weight_numel} + {path.weight_offset} + u] ="
        yield f"{f'sum_{path.index} +=' if plan.zeroed else row} {' + '.join(found)};"
    for number, sums in enumerate(wanted.d):
        for m3 in range(terms.dim3):
            found = (times(w, f"{g}_{begin['g'] + m3}") for w, g in sums if is_there(w))
            yield f"const Real d{number}_{m3} = {' + '.join(found) or 'Real(0)'};"
    for m1 in range(terms.dim1):
        if total := gradient_of_x(wanted, terms, m1):
            yield f"o_x_{begin['x'] + m1} += {total};"
    for number, value in enumerate(terms.values):
        if total := gradient_of_value(wanted, terms, number, begin["x"]):
            yield f"const Real r_{number} = {total};"
            yield from (f"o_y_{begin['y'] + m - block.offset} += Real({c!r}) * r_{number};" for m, c in value.terms)
