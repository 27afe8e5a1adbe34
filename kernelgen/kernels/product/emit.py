"""C++ text of a channelwise plan, for GPU and host.

A GPU's kernel has teams that loop over runs of edges, with channels across the lanes. Fixed code is in
``include/device.cuh``, the arithmetic of a path in ``kernelgen.arithmetic.couplings``, the function of a path group in
``kernelgen.kernels.product.group``. A run is all edges of a node (``registers``) or a fixed number of edges
(``atomics``, and ``plain``, where every edge is its own source and destination). A unit is a team's share of a run: one
path group and ``lanes x channels_per_thread`` of its channels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kernelgen.arithmetic.couplings import PathBody, PathTerms, path_body, path_terms
from kernelgen.arithmetic.directions import OPERANDS
from kernelgen.kernels.product.channelwise import Group, Plan
from kernelgen.kernels.product.group import GroupEmitter
from kernelgen.kernels.product.memory import Facts
from kernelgen.kernels.product.plan import OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule, HostSchedule
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import (
    BUFFERS,
    BYTES,
    C_TYPES,
    INDENT,
    Spec,
    braced,
    buffers_line,
    buffers_struct,
    gpu_entry,
    host_entry,
    indented,
)
from kernelgen.kernels.spherical_harmonics import inside
from kernelgen.problem.irreps import Block

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


def emit_product(plan: Plan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    return Source(KernelText(plan).text(), "cuda") if plan.spec.facts.backend == "cuda" else emit_host(plan)


def preamble(spec: Spec) -> str:
    """Comments that describe the kernel, and the types and constants of its text."""
    schedule = spec.cuda
    flag = "#define REAL_IS_FLOAT 1\n" if spec.dtype == "float32" else ""
    return (
        f"// problem    {spec.problem.key}\n// direction  {spec.direction.text}\n"
        f"// operation  {spec.operation}, {spec.dtype}, {spec.layout}, {spec.index}{', permuted' * spec.permuted}\n"
        f"// schedule   {schedule.key}\n"
        f"using Real = {C_TYPES[spec.dtype]};\nusing V = Real;\n{flag}"
        f"using index_t = {C_TYPES[spec.index]};\n"
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
            rows = f"zero_cut_rows<{self.facts.width(row)}>(b.out_g, {row}, b.spans, num_out, each, {blocks});"
            zeroing = ["ask_line(written);", rows, f"tell_of_zeros(written, launch, {blocks});"]
            written = [*self._length_of_runs(), *_first_blocks(blocks, zeroing, asked)]
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
        teams, stage, sums = schedule.block_size // schedule.lanes, plan.stage_elements, plan.sums_elements
        joint = plan.joint_elements
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
                *self._dispatch("finish", f"share, parts{', stage' * bool(plan.exchange_elements)}"),
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
        leave = [] if plan.sums_elements else ["    if (!working) return;"]
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
        *(_namespace("of_x", plan.of_x), _namespace("others", plan.others), _owners_entry(plan)),
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


def _owners_entry(plan: OwnersPlan) -> str:
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
    zeroing = [
        f"const int writers = int(min(({count} + {each - 1}ll) / {each}, {blocks}ll));",
        "if (blockIdx.x < writers) {",
        "    ask_line(written);",
        *(f"    write_zeros({array}, {size}, writers);" for array, size in sizes.items()),
        "    tell_of_zeros(written, launch, writers);",
        "}",
    ]
    return _first_blocks(blocks, zeroing, asked)


def _first_blocks(blocks: int, lines: Iterable[str], asked: Sequence[str]) -> list[str]:
    return [f"    if (blockIdx.x < {blocks}) {{", *indented(lines, 2), *indented(asked), "        return;", "    }"]


# Host C++ of a channelwise plan.
#
# Loops over the graph, layouts and locks are hand-written templates (``include/host*.hpp``, copied into the text). This
# module emits their parameter ``Form``: constants, blocks, and one function for each path group, which loops over the
# group's channels with vectors of ``channel_block`` channels. One worker runs all groups of an edge, so the host does
# not need ``plan.exclusive_in1`` and ``exclusive_out``: the first path that writes a block of an edge's own row starts
# it from zero, and later ones add to it.


HEADERS = ("host_vectors.hpp", "host.hpp")
# Fewer remaining channels than this are computed one by one: narrower vectors only add code.
LEAST_VECTOR = 4


def emit_host(plan: Plan) -> Source:
    """The kernel's source; it exports one ``extern "C"`` function with the pointers of ``BUFFERS``."""
    emitter = _HostEmitter(plan)
    math = ["#include <math.h>"] if plan.spec.harmonics is not None else []
    parts = [_preamble(plan), *math, *map(included, HEADERS), *emitter.form(), *_host_entry()]
    return Source("\n".join(parts) + "\n", "c++")


def _preamble(plan: Plan) -> str:
    spec = plan.spec
    return (
        f"// Equitune host kernel, {spec.operation}, {spec.dtype}, {spec.layout}, {spec.index} indices\n"
        f"// problem:   {spec.problem.key}\n"
        f"// direction: {spec.direction.text}\n"
        f"// schedule:  {spec.schedule.key}\n"
    )


def _components(stem: str, block: int, dim: int) -> list[str]:
    return [f"{stem}{block}_{m}" for m in range(dim)]


class _HostEmitter:
    def __init__(self, plan: Plan) -> None:
        assert isinstance(plan.spec.schedule, HostSchedule)
        self.plan, self.spec, self.problem = plan, plan.spec, plan.spec.problem
        self.direction = plan.spec.direction
        self.block = plan.spec.schedule.channel_block
        self.started: set[str] = set()

    def form(self) -> Iterator[str]:
        """Types, group functions and the struct ``Form``, the parameter of the hand-written templates."""
        yield "namespace {"
        yield ""
        names = ("add", "lanes", "load", "load_ahead", "store", "stream")
        yield f"using {', '.join(f'equitune::{name}' for name in names)};"
        yield ""
        yield f"using T = {C_TYPES[self.spec.dtype]};"
        yield "template <int N>"
        yield "using Vec = equitune::Vec<T, N>;"
        yield "using Edge = equitune::Edge<T>;"
        yield ""
        if self.spec.harmonics is not None:
            yield "#define DEVICE static EQUITUNE_INLINE"
            yield "using Real = T;"
            yield inside(self.spec)
        for number, group in enumerate(self.plan.groups):
            yield from self._group(number, group)
            yield ""
        yield "struct Form {"
        yield from indented(self._constants())
        if self.spec.harmonics is not None:
            yield f"{INDENT}static void harmonics(const T* v, T* y) {{ ::harmonics(v, y); }}"
            if "y" in self.direction.live_outputs:
                yield f"{INDENT}static void along_v(const T* v, const T* g, T* out) {{ ::along_v(v, g, out); }}"
        yield from indented(self._blocks("in1_blocks", self.problem.in1, {p.in1 for p in self.problem.paths}))
        yield from indented(self._blocks("out_blocks", self.problem.out, {p.out for p in self.problem.paths}))
        calls = (f"group_{number}(edge);" for number in range(len(self.plan.groups)))
        yield from indented(braced("static void edge(const Edge& edge)", calls))
        yield from ("};", "", "}  // namespace", "")

    def _constants(self) -> Iterator[str]:
        problem, spec, direction = self.problem, self.spec, self.direction
        schedule = spec.schedule
        yield "using T = ::T;"
        yield f"using Index = std::{spec.index}_t;"
        yield f"static constexpr int dim_in1 = {problem.dim_in1}, dim_in2 = {problem.dim_in2};"
        yield f"static constexpr int dim_out = {problem.dim_out}, weight_numel = {problem.weight_numel};"
        yield f"static constexpr int block = {self.block}, edges_per_chunk = {schedule.edges_per_chunk};"
        flags = {
            "conv": spec.operation == "conv",
            "owns_receiver": self.plan.owner == "receiver",
            "owns_sender": self.plan.owner == "sender",
            "mul_ir": spec.layout == "mul_ir",
            "shared_weights": problem.shared_weights,
            "y_are_vectors": spec.harmonics is not None,
            **{f"reads_{name}": name in direction.operands for name in OPERANDS},
            **{f"writes_{slot}": slot in direction.live_outputs for slot in "xywg"},
        }
        for name, value in flags.items():
            yield f"static constexpr bool {name} = {str(value).lower()};"
        yield ""

    def _blocks(self, name: str, blocks: tuple[Block, ...], used: set[int]) -> Iterator[str]:
        """A function that visits the blocks that some path uses; the caller zeroes the others."""
        visits = (
            f"visit(equitune::Block<{block.offset}, {block.dim}, {block.mul}>{{}});  // {block.text}"
            for block in (blocks[number] for number in sorted(used))
        )
        yield "template <class Visit>"
        yield from braced(f"static EQUITUNE_INLINE void {name}(const Visit& visit)", [*visits, "(void)visit;"])
        yield ""

    def _group(self, number: int, group: Group) -> Iterator[str]:
        """The function of a group: edge values, then loops over channels, at full width and for the remainder."""
        terms = [path_terms(self.problem)[p] for p in group.paths]
        bodies = [path_body(t, self.direction) for t in terms]
        yield f"// Group {number}: {', '.join(self.problem.in1[b].text for b in group.in1)}; {len(terms)} paths."
        yield f"EQUITUNE_NOINLINE void group_{number}(const Edge& edge) {{"
        for term, body in zip(terms, bodies, strict=True):
            yield from indented(self._edge_values(term, body))
        yield from indented(["", "const auto channels = [&](auto zero, int begin, int end) EQUITUNE_LAMBDA {"])
        yield from indented(self._channels(terms, bodies), 2)
        yield from indented(["};"])
        yield from indented(self._calls(group.mul))
        yield "}"

    def _calls(self, mul: int) -> Iterator[str]:
        width, begin = self.block, 0
        while begin < mul:
            if width < LEAST_VECTOR:
                width = 1
            end = mul - (mul - begin) % width
            if end > begin:
                yield f"channels({'T' if width == 1 else f'Vec<{width}>'}{{}}, {begin}, {end});"
            begin, width = end, width // 2

    def _edge_values(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        """Scalars of an edge: ``m3_1`` from y and ``tm3_1`` from ty."""
        for name in body.reads:
            match = re.fullmatch(r"(t?)m\d+_(\d+)", name)
            if match:
                value = terms.values[int(match[2])]
                total = " + ".join(f"T({c!r}) * edge.{match[1]}y[{component}]" for component, c in value.terms)
                yield f"const T {name} = {total};"

    def _channels(self, terms: list[PathTerms], bodies: list[PathBody]) -> Iterator[str]:
        yield "using V = decltype(zero);"
        sums = [name for body in bodies for name in body.accumulates if name.startswith("r")]
        yield from (f"V {name} = zero;" for name in sums)
        yield "for (int u = begin; u < end; u += lanes<V, T>) {"
        pairs = list(zip(terms, bodies, strict=True))
        for in1, run in itertools.groupby(pairs, key=lambda pair: pair[0].path.in1):
            yield from indented(self._input_block(in1, list(run)))
        yield "}"
        if sums:
            for term, body in pairs:
                yield from self._add_out_y(term, body)

    def _input_block(self, in1: int, pairs: list[tuple[PathTerms, PathBody]]) -> Iterator[str]:
        """Consecutive paths of one block of x: its channels are loaded once, its gradient is written once."""
        block = self.problem.in1[in1]
        reads = {name for _, body in pairs for name in body.reads}
        yield f"{{  // {block.text}"
        for stem in ("x", "tx"):
            yield from indented(
                self._load(stem, name, block, m)
                for m, name in enumerate(_components(stem, in1, block.dim))
                if name in reads
            )
        gradients = _components("ox", in1, block.dim) if "x" in self.direction.live_outputs else []
        yield from indented(self._start("out_x", gradients, block, fresh=self.plan.owner != "sender"))
        for term, body in pairs:
            yield from indented(self._path(term, body))
        yield from indented(self._finish("out_x", gradients, block))
        yield "}"

    def _path(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        path, problem = terms.path, self.problem
        out = problem.out[path.out]
        weights = f"weights {path.weight_offset}..{path.weight_offset + path.mul - 1}"
        texts = f"{problem.in1[path.in1].text} x {problem.in2[path.in2].text} -> {out.text}"
        yield f"{{  // path {path.index}: {texts}, {weights}"
        for name in (f"w{path.index}", f"tw{path.index}"):
            if name in body.reads:
                row = f"edge.{name.rstrip('0123456789')} + {path.weight_offset} + u"
                value = f"load<V>({row})" if problem.shared_weights else f"load_ahead<V>({row}, edge.ahead)"
                yield f"{INDENT}const V {name} = {value};"
        for stem in ("g", "tg"):
            yield from indented(
                self._load(stem, name, out, m)
                for m, name in enumerate(_components(stem, path.out, out.dim))
                if name in body.reads
            )
        sums = _components("og", path.out, out.dim) if "g" in self.direction.live_outputs else []
        yield from indented(self._start("out_g", sums, out, fresh=self.spec.operation == "plain"))
        weight = f"ow{path.index}"
        if weight in body.accumulates:
            start = f"load<V>(edge.out_w + {path.weight_offset} + u)" if problem.shared_weights else "zero"
            yield f"{INDENT}V {weight} = {start};"
        yield from indented(body.statements)
        if weight in body.accumulates:
            row = f"edge.out_w + {path.weight_offset} + u, {weight}"
            yield f"{INDENT}store({row});" if problem.shared_weights else f"{INDENT}stream({row}, edge.past_caches);"
        yield from indented(self._finish("out_g", sums, out))
        yield "}"

    def _load(self, buffer: str, name: str, block: Block, m: int) -> str:
        return f"const V {name} = load<V>(edge.{buffer} + {block.offset + m * block.mul} + u);"

    def _start(self, buffer: str, names: list[str], block: Block, *, fresh: bool) -> Iterator[str]:
        """Define a block's accumulators; in ``fresh`` rows the edge's first path to write it starts from zero."""
        first = fresh and bool(names) and names[0] not in self.started
        self.started.update(names)
        for m, name in enumerate(names):
            start = "zero" if first else f"load<V>(edge.{buffer} + {block.offset + m * block.mul} + u)"
            yield f"V {name} = {start};"

    def _finish(self, buffer: str, names: list[str], block: Block) -> Iterator[str]:
        for m, name in enumerate(names):
            yield f"store(edge.{buffer} + {block.offset + m * block.mul} + u, {name});"

    def _add_out_y(self, terms: PathTerms, body: PathBody) -> Iterator[str]:
        """Add to dF/dy, by the transpose of the edge values: partial sums of a component, one lane a channel."""
        totals: dict[int, list[str]] = {}
        for number, value in enumerate(terms.values):
            name = f"r{terms.path.index}_{number}"
            if name in body.accumulates:
                for component, c in value.terms:
                    totals.setdefault(component, []).append(f"T({c!r}) * {name}")
        for component, products in sorted(totals.items()):
            yield f"add(edge.out_y + {component * self.block}, {' + '.join(products)});"


def _host_entry() -> Iterator[str]:
    yield from host_entry()
    yield f"{INDENT}using Index = const Form::Index*;"
    yield f"{INDENT}equitune::run<Form>({{"
    for name in BUFFERS:
        kind = "T*" if name.startswith("out_") else "const T*"
        kind = {"sender": "Index", "receiver": "Index"}.get(name, kind)
        kind = "const std::int32_t*" if name in ("spans", "perm") else kind
        yield f"{INDENT * 2}static_cast<{kind}>({name}),"
    yield f"{INDENT * 2}num_edges, num_in, num_out, threads}});"
    yield "}"
