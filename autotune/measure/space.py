"""The search space as data: the values that each knob may take for one kernel on one device.

A :class:`Space` is an ordered mapping of knobs to sensible choices. Knobs without effect take their default value
(:meth:`Space.canonical`), so two descriptions of one kernel become the same schedule. Each kind makes its own
(``space`` in :mod:`autotune.measure.kinds`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.database.lookup import plan_for
from autotune.database.nearest import canonical_product, nearest_values, pair_knobs, product_knobs, threads_of
from autotune.errors import check_known
from autotune.workload.kind import KernelKind
from autotune.workload.known_kinds import kernel_kind
from kernelgen.arithmetic.directions import Direction
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs, power_of_two_at_most
from kernelgen.kernels.product.plan import MAX_REGISTERS, estimate_registers
from kernelgen.kernels.product.schedule import CudaSchedule, Schedule
from kernelgen.kernels.radial.plan import WITH_WGMMA
from kernelgen.kernels.spec import BYTES
from kernelgen.kernels.symmetric_contraction import contraction_plan
from kernelgen.problem.product import TensorProductProblem

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Space:
    """``knobs`` are in the order in which the sampler chooses them; ``spec.schedule`` is the default schedule.

    spec: as the operation's kind makes it. probes: schedules to measure once each, some outside the choices.
    """

    spec: Any
    knobs: Mapping[str, tuple[Any, ...]]
    probes: tuple[Knobs, ...] = ()

    @classmethod
    def of(cls, spec: Any, knobs: Mapping[str, tuple[Any, ...]], *probing: Callable[[Space], Iterable[Knobs]]) -> Space:
        """With the probes that these functions give for the space."""
        space = cls(spec, MappingProxyType({**knobs}))
        return dataclasses.replace(space, probes=tuple(probe for each in probing for probe in each(space)))

    @property
    def kind(self) -> KernelKind:
        return kernel_kind(self.spec.operation)

    @property
    def default(self) -> Knobs:
        return self.spec.schedule

    @property
    def size(self) -> int:
        """Number of combinations of choices, legal or not, equivalent ones included."""
        return math.prod(len(choices) for choices in self.knobs.values())

    def schedule(self, values: Mapping[str, Any]) -> Knobs:
        """The canonical schedule with these knob values, and the default's for the others."""
        return self.canonical(dataclasses.replace(self.default, **values))

    def values(self, schedule: Knobs) -> dict[str, Any] | None:
        """The schedule as choices of this space, or None if it is outside."""
        values = {knob: getattr(schedule, knob) for knob in self.knobs}
        inside = all(value in self.knobs[knob] for knob, value in values.items())
        return values if inside and self.schedule(values) == schedule else None

    def restricted(self, choices: Mapping[str, Sequence[Any]]) -> Space:
        """The space with some knobs limited to these values; the default schedule's values always stay."""
        knobs = dict(self.knobs)
        for knob, allowed in choices.items():
            check_known("knob", knob, knobs, f"{self.spec.operation} {self.spec.direction.name}: ")
            knobs[knob] = tuple(dict.fromkeys((*allowed, getattr(self.default, knob))))
        return dataclasses.replace(self, knobs=MappingProxyType(knobs))

    def suggest(self, trial: optuna.Trial) -> Knobs:
        """A schedule with every knob suggested by an Optuna trial."""
        return self.schedule({knob: trial.suggest_categorical(knob, choices) for knob, choices in self.knobs.items()})

    def nearest(self, schedule: Knobs) -> Knobs:
        """A schedule of another kernel, moved to the nearest choices of this space."""
        return self.schedule(nearest_values(self.knobs, self.default, schedule))

    def canonical(self, schedule: Knobs) -> Knobs:
        """Set knobs without effect on this kernel to their default values."""
        if not isinstance(schedule, Schedule):
            return schedule.canonical
        if not self.spec.problem.is_channelwise:
            kept = {knob: getattr(schedule, knob) for knob in ("fuse", *self.knobs)}
            return dataclasses.replace(self.default, **kept)
        return canonical_product(self.spec, schedule)

    def plan(self, schedule: Knobs) -> Any:
        """The plan that is compiled for a schedule; ScheduleError if illegal."""
        return plan_for(self.spec, schedule)

    def broken_limit(self, schedule: Knobs) -> str | None:
        """Why the schedule is illegal, or None if it is legal."""
        try:
            self.plan(schedule)
        except ScheduleError as error:
            return str(error)
        return None

    def shuffled(self, seed: int) -> Iterator[Knobs]:
        """Every combination once, canonical, in an order given by the seed; large spaces need no memory."""
        generator = random.Random(seed)
        size, choices = self.size, list(self.knobs.items())
        step = next(s for s in iter(lambda: generator.randrange(1, size + 1), None) if math.gcd(s, size) == 1)
        start = generator.randrange(size)
        for position in range(size):
            index, values = (start + position * step) % size, {}
            for knob, allowed in choices:
                index, digit = divmod(index, len(allowed))
                values[knob] = allowed[digit]
            yield self.schedule(values)

    def count_legal(self, most: int) -> int:
        """Number of distinct legal schedules, probes included, counted up to ``most``."""
        distinct: set[Knobs] = set(self.probes)
        for schedule in self.shuffled(0):
            if schedule not in distinct and self.broken_limit(schedule) is None:
                distinct.add(schedule)
                if len(distinct) >= most:
                    break
        return len(distinct)


def search_space(
    problem: TensorProductProblem,
    operation: str,
    direction: str | Direction,
    dtype: str,
    facts: DeviceFacts,
    layout: str = "mul_ir",
    deterministic: bool = False,
    num_edges: int | None = None,
    skewed: bool = False,
) -> Space:
    """The space of one kernel. The choices always include the default schedule's values.

    num_edges: as for ``default_schedule``. skewed: as for ``product_knobs``.
    """
    kind = kernel_kind(operation)
    spec = kind.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    spec = dataclasses.replace(spec, schedule=kind.default(spec, num_edges))
    if not problem.is_channelwise:
        return Space.of(spec, pair_knobs(spec), unfused)
    canonical = dataclasses.replace(spec, schedule=canonical_product(spec, spec.schedule))
    return Space.of(canonical, product_knobs(spec, num_edges, skewed), _tilings, _owners, _forms, unfused)


def harmonics_space(spec: Any) -> Space:
    """All choices of all knobs; threads as for every host kernel. On a GPU each way of staging is a probe."""
    default = kernel_kind(spec.operation).default(spec, None)
    knobs = {**default.choices} | ({"threads": threads_of(spec.facts)} if "threads" in default.choices else {})

    def staged(space: Space) -> Iterator[Knobs]:
        found = (space.schedule({"staging": staging}) for staging in knobs.get("staging", ()))
        return (schedule for schedule in found if schedule != default and not space.broken_limit(schedule))

    return Space.of(dataclasses.replace(spec, schedule=default), knobs, staged)


def contraction_space(spec: Any, num_nodes: int) -> Space:
    """The choices that make a kernel of their own. num_nodes: no task takes twice as many nodes as there are."""
    default, facts = spec.schedule, spec.facts
    plan = contraction_plan(spec)
    knobs: dict[str, tuple[Any, ...]] = {**default.choices}
    knobs["nodes_per_task"] = tuple(n for n in knobs["nodes_per_task"] if n < 2 * num_nodes)
    walks = (dataclasses.replace(default, gradients=gradients) for gradients in knobs["gradients"])
    if len({contraction_plan(dataclasses.replace(spec, schedule=schedule)).parts for schedule in walks}) == 1:
        del knobs["gradients"]
    knobs.pop("adds", None)  # rows are for sums in a fixed order alone: they take memory, and save no time
    if plan.sums_weights:
        del knobs["order"]
    elif facts.backend == "cuda":
        del knobs["sums"], knobs["zeros"]
    if facts.backend == "cpu":
        lanes, widest = facts.vector_bytes // BYTES[spec.dtype], power_of_two_at_most(spec.problem.channels)
        # Narrower vectors leave lanes idle; there are none of two channels.
        least, most = min(lanes // 2, widest), min(4 * lanes, widest)
        knobs["channel_block"] = tuple(n for n in knobs["channel_block"] if least <= n <= most and n != 2)
        knobs["threads"] = threads_of(facts)
    for knob, choices in knobs.items():
        value = getattr(default, knob)
        knobs[knob] = choices if value in choices else (*choices, value)
    return Space.of(spec, knobs, _other_statements)


def _other_statements(space: Space) -> list[Knobs]:
    """On a GPU: the default with each other form of the statements, and in smaller blocks."""
    if space.spec.facts.backend != "cuda":
        return []
    forms = ("gradients", "sums", "pace", "order", "zeros")
    changes: list[dict[str, Any]] = [{knob: value} for knob in forms for value in space.knobs.get(knob, ())]
    changes += [{"block_size": 64}, {"block_size": 64, "pace": "parts"}]
    found = dict.fromkeys(map(space.schedule, changes))
    return [schedule for schedule in found if schedule != space.default and space.broken_limit(schedule) is None]


# Knobs of gradients alone: a value's kernel keeps sums of a receiver in registers.
OF_GRADIENTS = ("order", "slices", "coupled")
# Knobs of devices with products of four warps.
OF_WARPGROUPS = ("products", "paths_at_once")


def radial_space(spec: Any) -> Space:
    knobs = dict(spec.schedule.choices)
    knobs["path_groups"] = knobs["path_groups"][: len(spec.problem.product.paths)]
    without: tuple[str, ...] = OF_GRADIENTS if spec.direction.name == "forward" else ()
    if spec.facts.arch not in WITH_WGMMA:
        without += OF_WARPGROUPS
    return Space.of(spec, {name: knobs[name] for name in knobs if name not in without})


# Probes of a space: schedules that are measured once each, beside the sampler's proposals.
#
# ``fuse`` is not a knob of the search. In 15 studies (H200, and a CPU of two cores) unfused schedules were a seventh of
# all trials and half of the first fifty, and the fastest of them took 4 to 29 times as long as the fastest fused one:
# torch's gather and scatter around the kernel dominate, whatever the other knobs. So there is one unfused probe, the
# default schedule without fusion, which tests this on every problem and graph. Kernels of pairs add to node rows in
# memory anyway: there unfused takes 1.0 to 1.5 times as long, and the probe may win.

# Most estimated registers per thread of a probed tiling: two blocks of 128 threads fit.
TILING_REGISTERS = 200
# Edges per warp and channels per lane.
_TILINGS = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 4))


def _legal(space: Space, values: Mapping[str, Any]) -> CudaSchedule | None:
    """The default schedule with these values, if all are choices of the space and legal together."""
    if not all(value in space.knobs.get(knob, (getattr(space.default, knob),)) for knob, value in values.items()):
        return None
    schedule = space.schedule(values)
    assert isinstance(schedule, CudaSchedule)
    return schedule if space.broken_limit(schedule) is None else None


def _tilings(space: Space) -> tuple[Knobs, ...]:
    """The default with small teams of several channels per lane, in as few path groups as registers allow.

    They read fewer edge values and issue fewer instructions per edge, but leave fewer teams, so several share a node.
    Three knobs and the path groups only help together, which a search of single knobs does not find.
    """
    if space.spec.facts.backend != "cuda" or space.spec.operation != "conv":
        return ()
    found = []
    for tile, teams in ((2, 1), (2, 2), (4, 2), (4, 4)):
        for groups in space.knobs["path_groups"]:
            values = {"edges_per_warp": tile, "channels_per_thread": tile, "teams_per_node": teams}
            schedule = _legal(space, {**values, "path_groups": groups, "prefetch": "none", "stage_edges": 8})
            if schedule and estimate_registers(space.plan(schedule)) <= TILING_REGISTERS:
                found.append(schedule)
                break
    return tuple(found)


def _owners(space: Space) -> tuple[Knobs, ...]:
    """The default without sums in memory, and so without initial zeros; one for each number of teams per edge.

    On a small graph that saves one of two launches. For a plain product each team takes one edge, so that memory is
    read in order: fastest on an H200 if a team has all channels, backward of mace-mp-first and mace-mp-medium. There
    the compiler uses fewer registers than estimated, because rows are loaded when used.
    """
    if "owners" not in space.knobs.get("accumulate", ()):
        return ()
    plain = {"edges_per_chunk": 1, "stage_edges": 4, "prefetch": "none", "ahead": "none", "block_size": 64}
    base = plain if space.spec.operation == "plain" else {"block_size": 128}
    found: dict[int, Knobs] = {}
    widest = max((path.mul for path in space.spec.problem.paths), default=1)
    for groups, (tile, channels) in itertools.product(space.knobs["path_groups"], _TILINGS):
        values = {"edges_per_warp": tile, "channels_per_thread": channels, "path_groups": groups, "warps_per_edge": 1}
        schedule = _legal(space, {**base, **values, "accumulate": "owners"})
        if schedule is None or 32 // tile * channels > widest:
            continue
        units = schedule.warps_per_edge
        if units in found or units not in space.knobs["warps_per_edge"]:
            continue
        plan = space.plan(schedule)
        fits = base is plain or estimate_registers(plan) <= MAX_REGISTERS
        if fits and "out_y" not in plan.zeroed:
            found[units] = schedule
    if base is plain and 1 in found:
        # Like the fastest schedule with sums in memory, but without them: two edges per team and no shared memory.
        two = {"edges_per_chunk": 2, "edge_operand": "inline", "block_size": 128, "min_blocks": 3}
        faster = _legal(space, {knob: getattr(found[1], knob) for knob in space.knobs} | two)
        return (*found.values(), *([faster] if faster else []))
    return tuple(found.values())


def _forms(space: Space) -> tuple[Knobs, ...]:
    """The default in forms that the sampler would try late.

    The kernel writes its own initial zeros, with the default's sums and with every gradient summed in memory. Or it
    copies weights to shared memory early, and so does not prefetch them into L2.
    """
    if not isinstance(space.default, CudaSchedule):
        return ()
    inside: tuple[dict[str, Any], ...] = ({"zeros": "inside"}, {"zeros": "inside", "accumulate": "atomics"})
    rings = ({"prefetch": ring, "ahead": "none"} for ring in ("ring2", "ring4"))
    found = (_legal(space, change) for change in (*inside, *rings))
    return tuple(dict.fromkeys(schedule for schedule in found if schedule))


def unfused(space: Space) -> tuple[Knobs, ...]:
    """The default without fusion; none for a deterministic kernel, because torch's sums have no fixed order."""
    if space.spec.operation == "plain" or space.spec.deterministic:
        return ()
    schedule = space.schedule({"fuse": False})
    return (schedule,) if space.broken_limit(schedule) is None else ()
