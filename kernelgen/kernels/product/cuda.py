"""CUDA C++ of a channelwise plan: a kernel whose teams loop over runs of edges, with channels across the lanes.

Fixed code is in ``include/device.cuh``, the arithmetic of a path in ``kernelgen.arithmetic.product``, the function
of a path group in ``kernelgen.kernels.product.group``. A run is all edges of a node (``registers``) or a fixed number
of edges (``atomics``, and ``plain``, where every edge is its own source and destination). A unit is a team's share of a
run: one path group and ``lanes x channels_per_thread`` of its channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernelgen.kernels.product.channelwise import Plan, exchange_elements, joint_elements, stage_elements, sums_elements
from kernelgen.kernels.product.group import GroupEmitter
from kernelgen.kernels.product.memory import Facts
from kernelgen.kernels.product.plan import OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import BYTES, Spec, buffers_line, buffers_struct, gpu_entry
from kernelgen.kernels.spherical_harmonics import inside

SHARED = (
    "    extern __shared__ __align__(16) unsigned char shared_bytes[];",
    "    Real* const shared = reinterpret_cast<Real*>(shared_bytes);",
)


def headers(schedule: CudaSchedule, has_ring: bool) -> list[str]:
    """The headers of a kernel: that of all kernels, and those that its schedule needs."""
    asked = {
        "product.cuh:weight_ring": has_ring,
        HEADER: schedule.zeros != "apart",
        HEADER_OF_ROWS: schedule.zeros == "cut",
        "product.cuh:prefetch_inputs": schedule.ahead == "along",
        "product.cuh:row_writes": schedule.writes == "rows",
    }
    return [included(name) for name in ("device.cuh", *(name for name, wanted in asked.items() if wanted))]


def emit_cuda(plan: Plan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    return Source(KernelText(plan).text(), "cuda")


def preamble(spec: Spec) -> str:
    """Comments that describe the kernel, and the types and constants of its text."""
    schedule = spec.cuda
    real = {"float32": "float", "float64": "double"}[spec.dtype]
    flag = "#define REAL_IS_FLOAT 1\n" if real == "float" else ""
    return (
        f"// problem    {spec.problem.key}\n// direction  {spec.direction.text}\n"
        f"// operation  {spec.operation}, {spec.dtype}, {spec.layout}, {spec.index}{', permuted' * spec.permuted}\n"
        f"// schedule   {schedule.key}\n"
        f"using Real = {real};\nusing V = Real;\n{flag}"
        f"using index_t = {'int' if spec.index == 'int32' else 'long long'};\n"
        f"constexpr int LANES = {schedule.lanes};\n"
        f"constexpr bool MUL_IR = {'true' if spec.layout == 'mul_ir' else 'false'};\n"
        f"constexpr int C = {schedule.channels_per_thread};  // channels a thread\n"
    )


def ask_all(spec: Spec, owner: str) -> list[str]:
    """Prefetch all that the kernel reads, if the schedule says so: then only the first load waits for DRAM."""
    if spec.cuda.ahead not in ("all", "along"):
        return []
    plain = spec.operation == "plain"
    spans = "num_edges" if plain else "num_in" if owner == "sender" else "num_out"
    index = {"spans": f"3 * {spans}"} if owner else {}
    index |= {} if plain else {"perm": "num_edges", "sender": "num_edges", "receiver": "num_edges"}
    sizes = elements(spec)
    asked = index | {name: sizes[name[-1]] for name in spec.operands}
    ask = "ask_along" if spec.cuda.ahead == "along" else "ask_all"
    return [f"    {ask}(b.{name}, {count});" for name, count in asked.items()]


def elements(spec: Spec) -> dict[str, str]:
    """The number of elements of each slot's array, as a C++ expression."""
    problem, plain = spec.problem, spec.operation == "plain"
    return {
        "x": f"{'num_edges' if plain else 'num_in'} * {problem.dim_in1}",
        "y": f"num_edges * {spec.dim_y}",
        "w": f"{'' if problem.shared_weights else 'num_edges * '}{problem.weight_numel}",
        "g": f"{'num_edges' if plain else 'num_out'} * {problem.dim_out}",
    }


def launch_of(plan: Plan) -> LaunchRule:
    """Blocks for the nodes that workers own, or for runs of edges; and those that write zeros."""
    schedule = plan.spec.cuda
    unit_blocks, runs_of_block = blocks_of_runs(plan)
    count = {"receiver": "out", "sender": "in"}.get(plan.owner, "edges")
    per = (runs_of_block,) if plan.owner else (schedule.edges_per_chunk, runs_of_block)
    share = Share(count, per, scale=unit_blocks)
    fixed = zero_blocks(schedule.zeros, schedule.block_size)
    return LaunchRule(schedule.block_size, plan.shared_bytes, (share,), fixed, whole_waves=plan.fills_waves)


def blocks_of_runs(plan: Plan) -> tuple[int, int]:
    """How many blocks share the same runs of edges, each with some of the units; and how many runs they share."""
    schedule = plan.spec.cuda
    units = schedule.warps_per_edge
    return max(1, -(-plan.units // units)), schedule.block_size // schedule.lanes // units // schedule.teams_per_node


class KernelText:
    """The text around the path groups: preamble, headers, buffers and the entry, which assigns teams to groups."""

    def __init__(self, plan: Plan) -> None:
        self.facts = Facts(plan)
        self.plan, self.spec, self.schedule = plan, plan.spec, self.facts.schedule
        self.problem, self.direction = plan.spec.problem, plan.spec.direction

    def text(self) -> str:
        included_here = headers(self.schedule, bool(self.plan.ring))
        waiting = {"apart": (), "inside": WAITING, "cut": WAITING_FOR_ROWS}[self.schedule.zeros]
        struct = buffers_struct(*waiting)
        top = [preamble(self.spec) + self.stage(), *included_here, inside(self.spec), struct]
        return "\n".join(part for part in [*top, *self.groups(), self._entry()] if part)

    def groups(self) -> list[str]:
        """The device functions of the path groups."""
        return [GroupEmitter(self.facts, number, group).text() for number, group in enumerate(self.plan.groups)]

    def stage(self) -> str:
        return f"constexpr int STAGE = {self.plan.stage};  // edges fetched at a time\n"

    def _entry(self) -> str:
        asked = ask_all(self.spec, self.plan.owner)
        zeros = self._zeros(asked)
        head = gpu_entry(self.schedule.block_size, self.schedule.min_blocks, *(ZEROS if zeros else ()))
        counted = ("num_edges",) * self.plan.stores_whole_rows
        buffers = buffers_line(*(("ready_of(written)", "launch", *counted) if zeros else ()))
        first, along = (asked, []) if self.schedule.ahead == "all" else ([], asked)
        work = self.body("block" if zeros else "blockIdx.x", [*zeros, *first], along, SHARED)
        return "\n".join([*head, buffers, *work, "}", ""])

    def _zeros(self, asked: Sequence[str]) -> list[str]:
        """Code of the first blocks, which write zeros; and the number of each other block."""
        schedule, sizes = self.schedule, elements(self.spec)
        blocks = zero_blocks(schedule.zeros, schedule.block_size)
        if not blocks:
            return []
        if self.plan.stores_whole_rows:
            row = self.problem.dim_out
            written = [*self._length_of_runs(), *cut_row_lines(blocks, self.facts.width(row), row, asked)]
        else:
            arrays = {f"b.{name}": sizes[name[-1]] for name in sorted(self.plan.zeroed)}
            written = zero_lines(blocks, schedule.block_size, BYTES[self.spec.dtype], arrays, asked)
        return [
            *written,
            "    ask_line(b.ready);",
            f"    const int block = int(blockIdx.x) - {blocks};",
        ]

    def body(
        self, block: str, first: Sequence[str] = (), along: Sequence[str] = (), shared: Sequence[str] = ()
    ) -> list[str]:
        """Code from a block's number to its teams' work.

        first: lines before it. along: lines after its first load. shared: lines that define ``shared``, if used.
        """
        schedule, plan = self.schedule, self.plan
        lines = [
            "    const int team_index = threadIdx.x / LANES;",
            "    Team team;",
            "    team.lane = threadIdx.x % LANES;",
            "    team.mask = LANES == 32 ? 0xffffffffu",
            "                            : ((1u << (LANES % 32)) - 1u) << (threadIdx.x % 32 - team.lane);",
            *first,
            *self._work(block),
            *along,
        ]
        teams, stage, sums = schedule.block_size // schedule.lanes, stage_elements(plan), sums_elements(plan)
        joint = joint_elements(plan)
        if stage or sums or joint:
            lines += shared
        lines.append(f"    Real* const stage = {f'shared + team_index * {stage}' if stage else 'nullptr'};")
        if sums:
            lines += [
                f"    Real* const sums = shared + {teams * stage} + team_index * {sums};",
                "    if (working) {",
                *self._dispatch("group", "begin, end, stage, sums"),
                "    }",
                "    __syncthreads();",
                "    if (working) {",
                f"    const Real* const parts = sums - share * {sums * schedule.warps_per_edge};",
                *self._dispatch("finish", f"share, parts{', stage' * bool(exchange_elements(plan))}"),
                "    }",
            ]
        elif joint:
            lines.append(f"    Real* const sums = shared + {teams * stage} + team_index * {joint};")
            lines += self._dispatch("group", "begin, end, stage, sums")
        else:
            lines += self._dispatch("group", "begin, end, stage, nullptr")
        return lines

    def _work(self, block: str) -> list[str]:
        """Compute the team's unit, run and edges."""
        schedule, plan = self.schedule, self.plan
        units, split = schedule.warps_per_edge, schedule.teams_per_node
        unit_blocks, runs = blocks_of_runs(plan)
        lines = [
            f"    const int unit = {block} % {unit_blocks} * {units} + team_index % {units};",
            f"    const int run = {block} / {unit_blocks} * {runs} + team_index / {units * split};",
        ]
        if not plan.owner:
            named = plan.fills_waves or plan.stores_whole_rows
            each = "each" if named else str(schedule.edges_per_chunk)
            return [
                *lines,
                *(self._length_of_runs() if plan.fills_waves and not plan.stores_whole_rows else ()),
                "    const int node = -1;  // none is owned",
                f"    const int begin = run * {each};",
                f"    if (unit >= {plan.units} || begin >= num_edges) return;",
                f"    const int end = begin + min({each}, int(num_edges) - begin);",
            ]
        nodes = "num_out" if plan.owner == "receiver" else "num_in"
        if split == 1:
            return [
                *lines,
                f"    if (unit >= {plan.units} || run >= {nodes}) return;",
                "    const int* const span = b.spans + 3 * run;",
                "    const int node = span[0], begin = span[1], end = span[2];",
            ]
        leave = [] if sums_elements(plan) else ["    if (!working) return;"]
        return [
            *lines,
            f"    const int share = team_index / {units} % {split};",
            f"    const bool working = unit < {plan.units} && run < {nodes};",
            *leave,
            "    const int* const span = b.spans + 3 * (working ? run : 0);",
            "    const int node = span[0], first = span[1], last = working ? span[2] : first;",
            f"    const int each = (last - first + {split - 1}) / {split};",
            "    const int begin = min(first + share * each, last), end = min(begin + each, last);",
        ]

    def _length_of_runs(self) -> list[str]:
        """Define ``each``, the edges of a run, which the launch decides if runs fill whole waves."""
        schedule, plan = self.schedule, self.plan
        if not plan.fills_waves:
            return [f"    const int each = {schedule.edges_per_chunk};"]
        blocks = zero_blocks(schedule.zeros, schedule.block_size)
        unit_blocks, runs = blocks_of_runs(plan)
        # There may be no run at all where first blocks write zeros without edges.
        some = "max(all_runs, 1)" if plan.stores_whole_rows else "all_runs"
        return [
            f"    const int all_runs = (int(gridDim.x) - {blocks}) / {unit_blocks} * {runs};",
            f"    const int each = (int(num_edges) + all_runs - 1) / {some};",
        ]

    def _dispatch(self, function: str, arguments: str) -> list[str]:
        """Call the function of the team's path group."""
        lines, first = [], 0
        for number, group in enumerate(self.plan.groups):
            first += self.plan.tiles(group)
            head = "if" if number == 0 else "else if"
            lines.append(f"    {head} (unit < {first}) {function}_{number}(b, team, unit, node, {arguments});")
        return lines


# CUDA C++ of an :class:`OwnersPlan`: two kernels in one launch (``accumulate="owners"``).
#
# The first blocks own senders and write dF/dx; the others take runs of edges and write dF/dy and dF/dw. The device
# functions of each have their own namespace. So a small graph's backward pass is a single launch, without another one
# that zeroes outputs.

_SIZES = ("num_edges", "num_in", "num_out")


def emit_owners(plan: OwnersPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    schedule = plan.spec.cuda
    parts = [
        *(preamble(plan.spec), *headers(schedule, bool(plan.of_x.ring or plan.others.ring))),
        *(inside(plan.spec), buffers_struct()),
        *(_namespace("of_x", plan.of_x), _namespace("others", plan.others), _entry(plan)),
    ]
    return Source("\n".join(part for part in parts if part), "cuda")


def owners_launch(plan: OwnersPlan) -> LaunchRule:
    """The blocks of both parts."""
    of_x, others = launch_of(plan.of_x), launch_of(plan.others)
    shares = (*of_x.shares, *others.shares)
    return LaunchRule(of_x.threads, plan.shared_bytes, shares, of_x.fixed + others.fixed)


def _namespace(name: str, plan: Plan) -> str:
    text = KernelText(plan)
    sizes = ", ".join(f"const long long {size}" for size in _SIZES)
    head = f"DEVICE void work(const Buffers& b, Real* const shared, const int block, {sizes}) {{"
    lines = [f"namespace {name} {{", text.stage(), *text.groups(), head, *text.body("block"), "}", f"}}  // {name}", ""]
    return "\n".join(lines)


def _entry(plan: OwnersPlan) -> str:
    schedule = plan.spec.cuda
    unit_blocks, nodes = blocks_of_runs(plan.of_x)
    lines = [
        *gpu_entry(schedule.block_size, schedule.min_blocks),
        buffers_line(),
        *(SHARED if plan.shared_bytes else ("    Real* const shared = nullptr;",)),
        *ask_all(plan.spec, plan.owner),
        f"    const int owning = {unit_blocks} * int((num_in + {nodes - 1}) / {nodes});",
        "    const int block = blockIdx.x;",
        f"    if (block < owning) of_x::work(b, shared, block, {', '.join(_SIZES)});",
        f"    else others::work(b, shared, block - owning, {', '.join(_SIZES)});",
        "}",
        "",
    ]
    return "\n".join(lines)


# The first blocks of a kernel that write zeros to what its others add to, as C++ text.
#
# With ``zeros="inside"`` that is all of an output, with ``"cut"`` some of its rows. Fixed code is in
# ``kernelgen/kernels/include/product.cuh``: ``zero_outputs`` and, for rows, ``cut_rows``.

# Extra arguments of such a kernel, and what its other blocks need of them.
ZEROS = ("unsigned long long* written", "unsigned long long launch")
WAITING = ("const unsigned long long* ready", "unsigned long long launch")
HEADER = "product.cuh:zero_outputs"
# With ``zeros="cut"``: what runs of edges need besides, and the header for rows.
WAITING_FOR_ROWS = (*WAITING, "long long num_edges")
HEADER_OF_ROWS = "product.cuh:cut_rows"
# Threads of all blocks that write zeros, and bytes that a thread writes before another block is used: a single block
# signals at once, while several have to wait for each other.
ZERO_THREADS, ZEROS_A_THREAD = 4096, 256


def zero_blocks(zeros: str, block_size: int) -> int:
    """The number of blocks, first in the grid, that write zeros. zeros: the knob."""
    return max(1, ZERO_THREADS // block_size) if zeros != "apart" else 0


def zero_lines(
    blocks: int, block_size: int, element_bytes: int, sizes: Mapping[str, str], asked: Sequence[str] = ()
) -> list[str]:
    """Code of the first blocks, which return. sizes: elements to zero by array. asked: lines of all first blocks."""
    each = block_size * ZEROS_A_THREAD // element_bytes
    count = " + ".join(sizes.values())
    return [
        f"    if (blockIdx.x < {blocks}) {{",
        f"        const int writers = int(min(({count} + {each - 1}ll) / {each}, {blocks}ll));",
        "        if (blockIdx.x < writers) {",
        "            ask_line(written);",
        *(f"            write_zeros({array}, {size}, writers);" for array, size in sizes.items()),
        "            tell_of_zeros(written, launch, writers);",
        "        }",
        *(f"    {line}" for line in asked),
        "        return;",
        "    }",
    ]


def cut_row_lines(blocks: int, width: int, elements: int, asked: Sequence[str] = ()) -> list[str]:
    """As :func:`zero_lines`, of the rows of values that runs of ``each`` edges do not store.

    elements: of a row. width: elements that are written at a time.
    """
    return [
        f"    if (blockIdx.x < {blocks}) {{",
        "        ask_line(written);",
        f"        zero_cut_rows<{width}>(b.out_g, {elements}, b.spans, num_out, each, {blocks});",
        f"        tell_of_zeros(written, launch, {blocks});",
        *(f"    {line}" for line in asked),
        "        return;",
        "    }",
    ]
