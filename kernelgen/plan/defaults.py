"""Chooses legal schedules for untuned products, harmonics and radial convolutions, by simple rules.

Those of other kinds are in their planners.

A better default does not need a new generator version: what a kernel computes does not depend on this module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError, UnsupportedError
from kernelgen.plan.channelwise import block_of_an_edge
from kernelgen.plan.pairs import pair_paths
from kernelgen.plan.path_groups import Group, group_paths
from kernelgen.plan.radial import RadialPlan, radial_plan
from kernelgen.plan.spherical_harmonics import harmonics_plan
from kernelgen.plan.tensor_product import estimate_registers, product_plan
from kernelgen.problem.radial_convolution import PRODUCTS
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.schedule.kernel_spec import BYTES, HarmonicsSpec, Spec
from kernelgen.schedule.knobs import power_of_two_at_most
from kernelgen.schedule.radial import RadialSchedule, RadialSpec
from kernelgen.schedule.spherical_harmonics import HarmonicsCudaSchedule, HarmonicsHostSchedule, HarmonicsSchedule
from kernelgen.schedule.tensor_product import CudaSchedule, HostSchedule, Schedule
from kernelgen.terms.directions import HarmonicsDirection

# The limit of ``small_graph_edges`` on an H200, where it was found, and on a host.
SMALL_GRAPH_EDGES = 4096


def small_graph_edges(facts: DeviceFacts) -> int:
    """Graphs of at most this many edges leave most of a device idle, so each edge should have its own worker.

    On a GPU a worker is a warp, and with an edge each at least half of the warps that fit would be idle: so half of
    those, as the nearest power of two, since graphs are classed by powers of two. 4096 on an H200, 2048 on an A10.
    """
    return SMALL_GRAPH_EDGES if facts.backend != "cuda" else 1 << round(math.log2(max(2, facts.warps // 2)))


def easy_registers(facts: DeviceFacts) -> int:
    """Most estimated registers a thread with which three blocks of 128 threads fit on a multiprocessor.

    Registers are allocated by eights: 168 on every compute capability so far.
    """
    return facts.registers_per_unit // (3 * 128) // 8 * 8


def default_schedule(spec_without: Spec, num_edges: int | None = None) -> Schedule:
    """A legal schedule by simple rules, without a search; ``spec_without.schedule`` is replaced, not read.

    num_edges: typical number of edges of a graph; None for large graphs.
    """
    if not spec_without.problem.is_channelwise:
        return _default_of_pairs(spec_without)
    if spec_without.facts.backend == "cpu":
        return _default_host(spec_without)
    muls = {path.mul for path in spec_without.problem.paths}
    least, most = len(muls) or 1, max(1, len(spec_without.problem.paths))
    sketch = _cuda_sketch(spec_without, min(muls, default=1), num_edges)
    failure: ScheduleError | None = None
    fetching = itertools.product(_or_none(sketch.ahead), _or_none(sketch.prefetch))
    for (ahead, prefetch), groups in itertools.product(fetching, range(least, most + 1)):
        schedule = dataclasses.replace(sketch, path_groups=groups, prefetch=prefetch, ahead=ahead)
        if spec_without.deterministic and "y" in spec_without.direction.live_outputs:
            block = block_of_an_edge(group_paths(spec_without.problem, groups), schedule)
            schedule = dataclasses.replace(schedule, **block)
        try:
            plan = product_plan(dataclasses.replace(spec_without, schedule=schedule))
        except ScheduleError as error:
            failure = error
            continue
        if estimate_registers(plan) <= easy_registers(spec_without.facts) or (groups == most and prefetch == "none"):
            assert isinstance(plan.spec.schedule, Schedule)
            return plan.spec.schedule  # without knobs that have no effect on this kernel
    raise failure or ScheduleError("no default schedule is legal")


def _or_none(choice: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((choice, "none")))


def _cuda_sketch(spec: Spec, fewest_channels: int, num_edges: int | None) -> CudaSchedule:
    """All but the path groups: teams as wide as the channels; long runs of edges on large graphs, short on small ones.

    The way to fetch rows is within 5% of the best of five, measured with six problems on an H200.
    """
    edges_per_warp = min(8, 32 // power_of_two_at_most(min(32, 2 * fewest_channels - 1)))
    lanes, live = 32 // edges_per_warp, spec.direction.live_outputs
    long = CudaSchedule(
        order=_default_order(spec),
        edges_per_warp=edges_per_warp,
        edge_operand="shared",
        stage_edges=min(8, lanes),
        prefetch="reload",
        ahead="weights",
    )
    if spec.operation == "plain" and live == "g":
        return dataclasses.replace(long, edges_per_chunk=2, stage_edges=4, block_size=64)
    if spec.operation == "plain":
        return dataclasses.replace(long, stage_edges=min(32, lanes), prefetch="copy", ahead="none")
    if num_edges is None or num_edges > small_graph_edges(spec.facts):
        # Lanes that add their own channels of mul_ir to rows of x touch up to 2l+1 times the sectors.
        return long.for_layout(spec.layout) if "x" in live and not spec.direction.tangents else long
    small = dataclasses.replace(long, ahead="all")
    if spec.deterministic or live == "g":
        return dataclasses.replace(small, teams_per_node=8, block_size=256)
    added = dataclasses.replace(
        small, accumulate="atomics", edges_per_chunk=1, stage_edges=4, prefetch="none", block_size=64
    )
    inside = "g" not in live and not spec.facts.is_hip
    return dataclasses.replace(added, zeros="inside") if inside else added


def _default_of_pairs(spec: Spec) -> Schedule:
    """Edge by edge, with as many teams a block as fit into shared memory.

    If every path has one pair, a team has eight lanes. For tetris-poly-1 this takes a third of the instructions of a
    warp an edge forward, and a quarter backward.
    """
    if spec.facts.backend == "cpu":
        return HostSchedule(accumulate="atomics")
    failure: ScheduleError | None = None
    edges_per_warp = 4 if all(path.pairs == 1 for path in pair_paths(spec.problem)) else 1
    for block_size in (128, 64, 32):
        schedule = CudaSchedule(accumulate="atomics", block_size=block_size, edges_per_warp=edges_per_warp)
        try:
            product_plan(dataclasses.replace(spec, schedule=schedule))
            return schedule
        except ScheduleError as error:
            failure = error
    raise UnsupportedError(f"one edge of this product does not fit a multiprocessor's shared memory: {failure}")


def _default_order(spec: Spec) -> str:
    """By receiver, unless a deterministic kernel computes gradients of x alone."""
    return "sender" if spec.deterministic and spec.direction.live_outputs == "x" else "receiver"


def _default_host(spec: Spec) -> HostSchedule:
    lanes = spec.facts.vector_bytes // BYTES[spec.dtype]
    widest = max((path.mul for path in spec.problem.paths), default=1)
    block = max(4, min(64, lanes, power_of_two_at_most(widest)))
    return HostSchedule(order=_default_order(spec), path_groups=max(1, len(spec.problem.paths)), channel_block=block)


def default_harmonics_schedule(
    problem: HarmonicsProblem, direction: HarmonicsDirection, dtype: str, facts: DeviceFacts
) -> HarmonicsSchedule:
    """A legal schedule by simple rules, without a search.

    CUDA: staged rows, with blocks small enough for two on a multiprocessor if possible.
    """
    if facts.backend == "cpu":
        return HarmonicsHostSchedule()
    for block_size in (128, 64, 32):
        schedule = HarmonicsCudaSchedule(block_size=block_size)
        spec = HarmonicsSpec(problem, direction, schedule, dtype, facts)
        try:
            if 2 * harmonics_plan(spec).shared_bytes <= facts.shared_per_unit:
                return schedule
        except ScheduleError:
            continue
    return HarmonicsCudaSchedule(staging="none")


# Registers of a lane for what stays during a step of edges, by tiles; with more, much would spill.
_MOST_KEPT = {1: 150, 2: 210}
# Registers of a lane for a node's sums with products of four warps, by tiles of 8 edges: of one group, and with four
# tiles of each of several. MACE large took 0.778 ms with 62 in three groups and 0.826 with 80 in two.
_MOST_SUMS, _MOST_OF_SEVERAL = {2: 150, 4: 84}, 78
# Up to so many hidden features it was found that a group more pays.
MEASURED_HIDDEN = 64
# Components of x times paths of a group with coupled cotangents; with more, much would spill. On an H200 MACE large
# took 1.54 ms with 40 in two groups and 2.33 with 153 in one, SevenNet-l3i5 1.65 with 49 in six, 2.41 with 70 in four.
_MOST_COUPLED = 50


def _kept(plan: RadialPlan, group: Group) -> int:
    """Registers of a lane for a node's sums, and for its edges' features, a path's weighted ones, and hidden ones."""
    spec = plan.spec
    dims = [spec.problem.in1[b].dim for b in group.in1]
    far = 2 * (sum(dims) + max(dims))
    halves = 4 * spec.steps * (2 if PRODUCTS[spec.accuracy] > 1 else 1)
    return 2 * sum(spec.problem.out[b].dim for b in group.out) + spec.schedule.tiles * (2 * far + halves)


def default_radial_schedule(spec: RadialSpec) -> RadialSpec:
    """The spec with the default schedule. Raises ScheduleError if none fits.

    By times on an H200. Of a value two tiles, where sums stay in registers, else 12 warps that load hidden features
    ahead. Of gradients coupled cotangents, unless they need more than twice as many path groups as others. Products of
    four warps, where the device has them: of gradients if they leave as many slices, of a value if they need no more
    path groups, or in class ``ieee`` one more than several. A value of MACE medium took 0.370 ms for 0.418, gradients
    0.650 for 0.761, those of large 1.378 for 1.555; in class ``tf32`` 0.272 for 0.290, 0.451 for 0.485 and 0.988 for
    1.053.
    """
    is_exact = PRODUCTS[spec.accuracy] > 1
    if not spec.is_gradient:
        two = RadialSchedule(tiles=2, edge_values="four" if is_exact else "kept")
        of_warps = _fewest_groups(spec, (two, RadialSchedule(warps=12, ahead="hidden"), RadialSchedule()))
        return _value_by_warpgroups(of_warps)
    plain = RadialSchedule(order="in2", edge_values="reloaded")
    by_lanes = _fewest_groups(spec, tuple(dataclasses.replace(plain, slices=count) for count in (4, 2, 1)))
    try:
        coupled = _fewest_groups(spec, (RadialSchedule(order="in2", slices=4, coupled=4 if is_exact else 2),))
    except ScheduleError:
        return by_lanes
    if coupled.schedule.path_groups > 2 * by_lanes.schedule.path_groups:
        return by_lanes
    return _gradients_by_warpgroups(coupled)


def _value_by_warpgroups(spec: RadialSpec) -> RadialSpec:
    """The spec of a value with products of four warps; as it is where those are not legal, or need too many groups.

    Class ``tf32`` has registers for more sums with two tiles: MACE large took 0.585 ms in one group, 0.615 by warps.
    """
    is_exact = PRODUCTS[spec.accuracy] > 1
    four = RadialSchedule(tiles=4, ahead="hidden", products="wgmma", paths_at_once=1)
    two = () if is_exact else (RadialSchedule(tiles=2, products="wgmma", paths_at_once=1),)
    try:
        chosen = _fewest_groups(spec, (four, *two))
    except ScheduleError:
        return spec
    before, groups = spec.schedule.path_groups, chosen.schedule.path_groups
    if groups > before + (is_exact and before > 1 and spec.hidden <= MEASURED_HIDDEN):
        return spec
    if groups == 1 or not is_exact:
        return chosen
    return dataclasses.replace(spec, schedule=dataclasses.replace(chosen.schedule, ahead="none", paths_at_once=2))


def _gradients_by_warpgroups(spec: RadialSpec) -> RadialSpec:
    """The spec of gradients with products of four warps; as it is where those are not legal, or leave fewer slices."""
    schedule = dataclasses.replace(spec.schedule, products="wgmma", paths_at_once=10)
    chosen = dataclasses.replace(spec, schedule=schedule)
    try:
        before, after = radial_plan(spec), radial_plan(chosen)
    except ScheduleError:
        return spec
    pairs = zip(before.product.groups, after.product.groups, strict=True)
    return chosen if all(before.slices(one) <= after.slices(other) for one, other in pairs) else spec


def _fewest_groups(spec: RadialSpec, forms: tuple[RadialSchedule, ...]) -> RadialSpec:
    """The spec with the fewest path groups that fit, in the first form that does. Raises ScheduleError if none does.

    Of a value, a lane's sums must stay in registers; on an H200 every further group cost 10 to 20% (edges are loaded
    again). Gradients take several slices: fewer sums are added in memory.
    """
    last: RadialSpec | None = None
    for count in range(1, len(spec.problem.paths) + 1):
        for form in forms:
            chosen = dataclasses.replace(spec, schedule=dataclasses.replace(form, path_groups=count))
            try:
                plan = radial_plan(chosen)
            except ScheduleError:
                continue
            if all(_has_registers(plan, group) for group in plan.product.groups):
                return chosen
            last = chosen
    if last is None:
        raise ScheduleError(f"no schedule fits {spec.facts.name}: {spec.problem.key}, {spec.hidden} hidden features")
    return last


def _has_registers(plan: RadialPlan, group: Group) -> bool:
    spec = plan.spec
    if not spec.is_gradient and spec.schedule.products == "wgmma":
        is_one = spec.schedule.path_groups == 1 or spec.schedule.tiles < 4
        most = _MOST_SUMS[spec.schedule.tiles] if is_one else _MOST_OF_SEVERAL
        return 2 * sum(spec.problem.out[b].dim for b in group.out) <= most
    if not spec.is_gradient:
        return _kept(plan, group) <= _MOST_KEPT[spec.schedule.tiles]
    components = sum(spec.problem.in1[block].dim for block in group.in1)
    return not spec.schedule.coupled or components * len(group.paths) <= _MOST_COUPLED
