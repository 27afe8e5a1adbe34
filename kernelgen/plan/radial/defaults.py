"""Chooses legal schedules for untuned radial convolutions, by simple rules.

A better default does not need a new generator version: what a kernel computes does not depend on this module.
"""

from __future__ import annotations

import dataclasses

from kernelgen.errors import ScheduleError
from kernelgen.plan.path_groups import Group
from kernelgen.plan.radial_convolution import RadialPlan, radial_plan
from kernelgen.problem.radial_convolution import PRODUCTS
from kernelgen.schedule.radial import RadialSchedule, RadialSpec

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
