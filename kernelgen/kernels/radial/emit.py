"""The text around the path groups: preamble, headers, and the entry, which assigns blocks to slices of the matrix.

Blocks stay: as many start as run at once, and each keeps its slices of the matrix (a path group's weights of 16
channels each) in shared memory. Of gradients without coupled cotangents, warps with the same slices divide the work of
all edges and receivers equally; else all warps divide that of all slices (``shares`` of ``include/radial.cuh``).
"""

from __future__ import annotations

from kernelgen.kernels.product.channelwise import Group
from kernelgen.kernels.radial.coupled import CoupledGroup
from kernelgen.kernels.radial.group import RadialGroup
from kernelgen.kernels.radial.plan import MARKS, TILE, WARPGROUP, RadialPlan
from kernelgen.kernels.radial.warpgroup import ProductsInFlight, WarpgroupGroup, WarpgroupValues, warpgroup_calls
from kernelgen.kernels.source import LaunchRule, Share, Source, included
from kernelgen.kernels.spec import buffers_line, buffers_struct, gpu_entry
from kernelgen.problem.product import PRODUCTS

# Profilers tell it from other convolutions.
ENTRY = "equitune_radial"


def emit_radial(plan: RadialPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    of_warpgroups = WarpgroupGroup if plan.spec.is_gradient else WarpgroupValues
    groups: list[RadialGroup] = []
    for number, group in enumerate(plan.product.groups):
        by_warps = CoupledGroup if plan.coupled(group) else RadialGroup
        groups.append((of_warpgroups if plan.by_warpgroups else by_warps)(plan, number, group))
    headers = included("tensor_cores.cuh") + included("radial.cuh:products") + included("radial.cuh:shares")
    if plan.loads_matrix_at_once or (plan.by_warpgroups and not plan.spec.is_gradient):
        headers += included("radial.cuh:matrix_at_once")
    if plan.stores_rows:
        headers += included("radial.cuh:whole_rows")
    if (plan.by_warpgroups and plan.spec.is_gradient) or any(map(plan.coupled, plan.product.groups)):
        headers += included("coupled.cuh")
    if plan.by_warpgroups:
        of_hidden = 2 * plan.spec.steps * ("w" in plan.spec.direction.live_outputs)
        widths = {width for group in groups if isinstance(group, ProductsInFlight) for width in group.widths}
        headers += warpgroup_calls(widths, of_hidden) + included("warpgroup.cuh")
    parts = [_preamble(plan), included("device.cuh"), _constants(plan) + headers, buffers_struct()]
    text = "\n".join([*parts, *(group.text() for group in groups), _entry(plan, groups)])
    return Source(text, "cuda", ENTRY, "a" if plan.by_warpgroups else "")


def radial_launch(plan: RadialPlan) -> LaunchRule:
    """For each part of an edge a warp, or a team of warps, for every 16 edges, but no more blocks than run at once."""
    schedule = plan.spec.schedule
    share = Share("edges", (TILE, plan.teams), scale=sum(map(plan.parts, plan.product.groups)))
    return LaunchRule(32 * schedule.warps, plan.shared_bytes, (share,), 0, schedule.min_blocks)


def _preamble(plan: RadialPlan) -> str:
    spec = plan.spec
    return (
        f"// problem    {spec.problem.key}\n// direction  {spec.direction.text}, {spec.hidden} hidden features\n"
        f"// operation  convolution with weights from hidden features, {spec.accuracy}, {spec.layout}, {spec.index}\n"
        f"// schedule   {spec.schedule.key}\n"
        "using Real = float;\nusing V = Real;\n#define REAL_IS_FLOAT 1\n"
        f"using index_t = {'int' if spec.index == 'int32' else 'long long'};\n"
        "constexpr int LANES = 32;\n"
        f"constexpr bool MUL_IR = {'true' if spec.layout == 'mul_ir' else 'false'};\n"
        "constexpr int C = 2;  // channels a lane\n"
    )


def _constants(plan: RadialPlan) -> str:
    spec = plan.spec
    low = PRODUCTS[spec.accuracy] > 1
    return (
        f"constexpr int THREADS = {32 * spec.schedule.warps}, STAGE = {plan.stage};\n"
        f"constexpr int HIDDEN = {spec.hidden}, STEPS = {spec.steps}, ROW = {plan.row_halves};\n"
        f"constexpr int CHANNELS = {plan.channels};\n"
        f"constexpr bool LOW = {'true' if low else 'false'};\n"
        f"constexpr int PATH = {plan.path_halves}, LOW_PART = {plan.path_halves // 2 if low else 0};\n"
        f"constexpr bool EDGE_ROWS = {'true' if spec.is_gradient else 'false'};\n"
    )


def _entry(plan: RadialPlan, groups: list[RadialGroup]) -> str:
    schedule = plan.spec.schedule
    before_stages = 0 if schedule.coupled else plan.slice_halves(plan.product.groups[0])
    before_slices = f" + {plan.hidden_halves}" if plan.hidden_halves else ""
    lines = [
        *gpu_entry(32 * schedule.warps, schedule.min_blocks, entry=ENTRY),
        buffers_line(),
        "    extern __shared__ __align__(16) unsigned char shared_bytes[];",
        f"    unsigned short* const slice = reinterpret_cast<unsigned short*>(shared_bytes){before_slices};",
        "    // Compilers see that lanes have the same warp: they need not prepare for lanes that go apart.",
        "    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0, 32);",
        "    const Warp team = {lane, lane / 4, lane % 4, slice};",
        f"    Real* const stages = reinterpret_cast<Real*>(slice + {before_stages});",
        "    int runs = run_of(team, b.spans, int(num_out), int(num_edges) - 1) + 1;  // up to the last one with edges",
        *(_parts_in_sequence(plan, groups) if plan.parts_in_sequence else _blocks_of_parts(plan, groups)),
    ]
    return "\n".join([*lines, "}", ""])


def _parts_in_sequence(plan: RadialPlan, groups: list[RadialGroup]) -> list[str]:
    """Which places in the work of which parts a block has, and its warps' equal shares of these.

    All blocks have the same work, so that some have edges of two parts, one after the other.
    """
    works = [f"{plan.parts(group.group) * group.cost} * {_work(group)}" for group in groups]
    lines = ["    // Parts follow each other, each as long as its work."]
    first_part = 0
    for place, group in enumerate(groups):
        number, parts, cost = group.number, plan.parts(group.group), group.cost
        matrix = f"{plan.slice_halves(group.group) // 2} + " if plan.spec.schedule.coupled else ""
        before = " + ".join(works[:place]) or "0"
        lines += [
            "    {",
            f"        const long long from = ({' + '.join(works)}) * blockIdx.x / gridDim.x - ({before});",
            f"        int part = int(max(from, 0ll) / ({cost} * {_work(group)}));",
            '        _Pragma("unroll 1")',
            f"        for (; part < {parts}; ++part) {{",
            "            runs = unknown(runs);",
            f"            const long long whole = {' + '.join(works)}, work = {_work(group)};",
            f"            const Places at = places_of_block(whole, {before} + {cost} * part * work, {cost}, work);",
            "            if (at.end == 0) break;",
            "            if (at.begin == at.end) continue;",
            *_share(plan, group),
            *(_marks(plan, group.group, first_part) if plan.stores_rows else ()),
            f"            Real* const stage = stages + {matrix}{_team(plan)} * {plan.stream_reals(group.group)};",
            f"            group_{number}(b, team, part, first, end, int(num_out), slice, stage{_rows_of(plan)});",
            "            __syncthreads();  // the next part's matrix takes the place of this one's",
            "        }",
            "    }",
        ]
        first_part += parts
    return lines


def _work(group: RadialGroup) -> str:
    """The work of a part of a group, as C++."""
    return f"(num_edges + {group.of_receiver}ll * runs)"


def _edges_between(group: RadialGroup, begin: str, end: str) -> list[str]:
    """Definition of the edges between two places in the work of a part, ``first`` to ``end - 1``."""
    edge = f"edge_at_work<{group.of_receiver}>(team, b.spans, runs, {{}})"
    return [f"            const int first = {edge.format(begin)};", f"            const int end = {edge.format(end)};"]


def _share(plan: RadialPlan, group: RadialGroup) -> list[str]:
    """Edges of a team; of a block, if its warps multiply together and each have edges: they divide these by steps."""
    if plan.by_warpgroups and plan.spec.is_gradient:
        return _edges_between(group, "at.begin", "at.end")
    team, teams = _team(plan), plan.teams
    places = [f"at.begin + (at.end - at.begin) * {number} / {teams}" for number in (team, f"({team} + 1)")]
    return _edges_between(group, *places)


def _team(plan: RadialPlan) -> str:
    """The number of a warp's team."""
    return "warp" if plan.teams == plan.spec.schedule.warps else f"(warp / {WARPGROUP})"


def _marks(plan: RadialPlan, group: Group, before: int) -> list[str]:
    """Definition of the marks of a warp and of those with its channels; before: parts before its group's first one."""
    part = f"({before} + part)"
    if plan.teams < plan.spec.schedule.warps:
        part = f"({WARPGROUP} * {part} + warp % {WARPGROUP // plan.copies(group)})"
    return [f"            unsigned* const marks = reinterpret_cast<unsigned*>(b.{MARKS}) + {part} * num_out;"]


def _rows_of(plan: RadialPlan) -> str:
    """Further arguments of a group that stores rows: the runs whose rows it zeroes, and its marks."""
    runs = ",\n                    int(num_out * first / num_edges), int(num_out * end / num_edges), marks"
    return runs * plan.stores_rows


def _blocks_of_parts(plan: RadialPlan, groups: list[RadialGroup]) -> list[str]:
    """A block has one part; the warps with the same part have equal shares of its work."""
    product = plan.product
    lines = [
        "    // Blocks beyond one a part are shared by work.",
        f"    const int more = int(gridDim.x) - {sum(map(plan.parts, product.groups))};",
    ]
    costs = [plan.parts(group.group) * group.cost for group in groups]
    before = work = 0
    for group, cost in zip(groups, costs, strict=True):
        number, parts = group.number, plan.parts(group.group)
        lines.append(f"    const int begin{number} = {before} + int(more * {work}ll / {sum(costs)});")
        before, work = before + parts, work + cost
        lines += [
            f"    const int end{number} = {before} + int(more * {work}ll / {sum(costs)});",
            f"    if (int(blockIdx.x) >= begin{number} && int(blockIdx.x) < end{number}) {{",
            f"        const int at = int(blockIdx.x) - begin{number}, part = at % {parts};",
            f"        const int blocks = (end{number} - begin{number} - part + {parts - 1}) / {parts};",
            f"        const long long share = {_team(plan)} * blocks + at / {parts}, shares = blocks * {plan.teams};",
            *_edges_between(group, f"{_work(group)} * share / shares", f"{_work(group)} * (share + 1) / shares"),
            f"        Real* const stage = stages + {_team(plan)} * {plan.stream_reals(group.group)};",
            f"        group_{number}(b, team, part, first, end, int(num_out), slice, stage);",
            "        return;",
            "    }",
        ]
    return lines
