"""The search space as data: which values each knob may take for one kernel on one device.

Enters a problem, an operation, a direction, a dtype and device facts; leaves a :class:`Space`: an ordered mapping of
knob to choices, restricted to values that make sense. Knobs without effect take their default value
(:meth:`Space.canonical`), so two spellings of one kernel are recognised as the same schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, unknown_name
from autotune.families import Family, family_of
from autotune.probes import probes_of, unfused
from kernelgen.channel_plan import block_of_an_edge
from kernelgen.defaults import SMALL_GRAPH_EDGES
from kernelgen.device import DeviceFacts
from kernelgen.direction import Direction
from kernelgen.errors import ScheduleError
from kernelgen.grouping import group_paths
from kernelgen.pairs import pair_paths
from kernelgen.plan import launches_early
from kernelgen.problem import TensorProductProblem
from kernelgen.schedule import CudaSchedule, HostSchedule, Knobs, Schedule, power_of_two_at_most
from kernelgen.spec import Spec

if TYPE_CHECKING:
    import optuna


# Groups beyond one an input block that are tried one by one: the best count is rarely a round number.
FINE_GROUPS = 3


@dataclass(frozen=True)
class Space:
    """``knobs`` are in the order in which a sampler is asked; ``spec.schedule`` is the default schedule.

    spec: as the family of its operation makes it. probes: schedules that are worth one measurement each, some outside
    the choices.
    """

    spec: Any
    knobs: Mapping[str, tuple]
    probes: tuple[Knobs, ...] = ()

    @property
    def family(self) -> Family:
        return family_of(self.spec.operation)

    @property
    def default(self) -> Knobs:
        return self.spec.schedule

    @property
    def size(self) -> int:
        """Combinations of choices, before legality and equivalence."""
        return math.prod(len(choices) for choices in self.knobs.values())

    def schedule(self, values: Mapping[str, Any]) -> Knobs:
        """The canonical schedule with these knob values; knobs that are not given take the default's."""
        return self.canonical(dataclasses.replace(self.default, **values))

    def values(self, schedule: Knobs) -> dict[str, Any] | None:
        """The schedule as choices of this space, or None if they do not make it."""
        values = {knob: getattr(schedule, knob) for knob in self.knobs}
        inside = all(value in self.knobs[knob] for knob, value in values.items())
        return values if inside and self.schedule(values) == schedule else None

    def restricted(self, choices: Mapping[str, Sequence]) -> Space:
        """The space with only these values of some knobs; the default schedule's values always stay."""
        knobs = dict(self.knobs)
        for knob, allowed in choices.items():
            if knob not in knobs:
                raise ConfigError(
                    f"{self.spec.operation} {self.spec.direction.name}: {unknown_name('knob', knob, knobs)}"
                )
            knobs[knob] = tuple(dict.fromkeys((*allowed, getattr(self.default, knob))))
        return dataclasses.replace(self, knobs=MappingProxyType(knobs))

    def suggest(self, trial: optuna.Trial) -> Knobs:
        """Ask an Optuna trial for every knob."""
        return self.schedule({knob: trial.suggest_categorical(knob, choices) for knob, choices in self.knobs.items()})

    def nearest(self, schedule: Knobs) -> Knobs:
        """A schedule found for another kernel, moved to the nearest choices of this space."""
        values = {}
        for knob, choices in self.knobs.items():
            value = getattr(schedule, knob)
            if value not in choices and isinstance(value, int):
                value = min(choices, key=lambda choice: abs(math.log((choice + 1) / (value + 1))))
            values[knob] = value if value in choices else getattr(self.default, knob)
        return self.schedule(values)

    def canonical(self, schedule: Knobs) -> Knobs:
        """Replace the values of knobs that have no effect on this kernel."""
        assert isinstance(schedule, Schedule)
        if not self.spec.problem.is_channelwise:
            kept = {knob: getattr(schedule, knob) for knob in ("fuse", *self.knobs)}
            return dataclasses.replace(self.default, **kept)
        changes: dict[str, Any] = {}
        fresh, plain = type(schedule)(), self.spec.operation == "plain"
        fused = schedule.fuse and not plain
        owned = fused and schedule.accumulate == "registers"
        block = self._block_of_an_edge(schedule) if fused or plain else {}
        if plain:
            changes["fuse"] = fresh.fuse
        if not (fused or block):
            changes["accumulate"] = fresh.accumulate
        if not owned:
            changes["order"] = fresh.order
        if isinstance(schedule, CudaSchedule):
            changes["stage_edges"] = min(schedule.stage_edges, schedule.lanes)
            if owned:
                changes["edges_per_chunk"] = fresh.edges_per_chunk
            else:
                changes["teams_per_node"] = 1
            if changes.get("teams_per_node", schedule.teams_per_node) == 1:
                changes["finish"] = "blocks"
            if not (fused or plain) or schedule.accumulate == "owners":
                changes |= {"early": False, "zeros": "apart"}
            elif schedule.zeros == "inside":
                changes["early"] = False
            if fused and schedule.accumulate == "owners":
                changes["warps_per_edge"] = 1
            elif not owned:
                changes["stage_edges"] = min(changes["stage_edges"], max(4, schedule.edges_per_chunk))
        return dataclasses.replace(schedule, **changes | block)

    def _block_of_an_edge(self, schedule: Schedule) -> dict[str, int]:
        """With one writer a gradient of y, the teams that share an edge are a block, where they can be."""
        alone = self.spec.deterministic or schedule.accumulate == "owners"
        if not isinstance(schedule, CudaSchedule) or not alone or "y" not in self.spec.direction.live_outputs:
            return {}
        return block_of_an_edge(group_paths(self.spec.problem, schedule.path_groups), schedule)

    def plan(self, schedule: Knobs) -> Any:
        """Of what is compiled for a schedule; ScheduleError if that is not legal."""
        return self.family.plan(self.family.kernel_spec(self.spec, schedule))

    def broken_limit(self, schedule: Knobs) -> str | None:
        """Why the schedule is illegal, or None if it is legal."""
        try:
            self.plan(schedule)
        except ScheduleError as error:
            return str(error)
        return None

    def shuffled(self, seed: int) -> Iterator[Knobs]:
        """Every combination once, canonical, in an order that depends on the seed; needs no memory for large spaces."""
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
        """Distinct legal schedules, probes included, counted up to ``most``."""
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
) -> Space:
    """The space of one kernel. The default schedule's values are always among the choices.

    num_edges: as for ``default_schedule``.
    """
    family = family_of(operation)
    spec = family.spec(problem, operation, direction, dtype, layout, facts, deterministic)
    default = family.default(spec, num_edges)
    if not problem.is_channelwise:
        return _space_of_pairs(dataclasses.replace(spec, schedule=default))
    knobs: dict[str, tuple] = {}
    owners = ("owners",) if _has_owners(spec, num_edges) else ()
    if operation == "conv":
        knobs["accumulate"] = ("registers", "atomics", *owners)
        knobs["order"] = ("receiver", "sender")
    elif owners:
        knobs["accumulate"] = ("registers", *owners)
    knobs["path_groups"] = _path_groups(problem)
    knobs["edges_per_chunk"] = (8, 32, 128) if facts.backend == "cpu" else (1, 2, 8, 16, 32, 128)
    small = _is_small(num_edges)
    cuda = facts.backend == "cuda"
    knobs |= _cuda_knobs(problem, small, small or deterministic) if cuda else _host_knobs(problem, dtype, facts)
    if cuda and operation == "conv":
        if not problem.shared_weights:
            knobs["prefetch"] = (*knobs["prefetch"], "ring2", "ring4")
        knobs["teams_per_node"] = (1, 2, 4, 8)
        knobs["finish"] = ("blocks", "loop")
    if _waits_for_zeros(spec, num_edges):
        knobs["zeros"] = ("apart", "inside")
        if launches_early(facts):
            knobs["early"] = (False, True)
    for knob, choices in knobs.items():
        value = getattr(default, knob)
        knobs[knob] = choices if value in choices else (*choices, value)
    space = Space(dataclasses.replace(spec, schedule=default), MappingProxyType(knobs))
    space = dataclasses.replace(space, spec=dataclasses.replace(spec, schedule=space.canonical(default)))
    return dataclasses.replace(space, probes=probes_of(space))


def _is_small(num_edges: int | None) -> bool:
    return num_edges is not None and num_edges <= SMALL_GRAPH_EDGES


def _has_owners(spec: Spec, num_edges: int | None) -> bool:
    """Whether ``accumulate="owners"`` may pay: gradients of edges, apart or of so few edges that launches decide."""
    live = spec.direction.live_outputs
    if spec.facts.backend != "cuda" or "g" in live:
        return False
    if spec.operation == "plain":
        return "y" in live and not spec.deterministic  # which has one writer by itself
    return live != "x" and _is_small(num_edges)


def _waits_for_zeros(spec: Spec, num_edges: int | None) -> bool:
    """Whether zeros may be a launch that counts: those of a small graph's gradients; of a plain product those of y."""
    if spec.deterministic or spec.facts.backend != "cuda":
        return False
    live = spec.direction.live_outputs
    return "g" not in live and ("y" in live if spec.operation == "plain" else _is_small(num_edges))


def _space_of_pairs(spec: Spec) -> Space:
    """Edge by edge, so only how many teams share an edge, a warp and a multiprocessor, or threads a host."""
    knobs: dict[str, tuple] = {"threads": threads_of(spec.facts)}
    if spec.facts.backend == "cuda":
        knobs = {
            "block_size": (32, 64, 128, 256, 512),
            "min_blocks": (0, 2, 3, 4, 6, 8),
            "edges_per_warp": (1, 2, 4, 8),
        }
        if not spec.deterministic:
            knobs["path_groups"] = tuple(n for n in (1, 2, 4, 8) if n <= max(1, len(pair_paths(spec.problem))))
    space = Space(spec, MappingProxyType(knobs))
    return dataclasses.replace(space, probes=unfused(space))


def threads_of(facts: DeviceFacts) -> tuple[int, ...]:
    """All cores or half of them."""
    return (0, facts.units // 2) if facts.units >= 4 else (0,)


def _multiplicities(problem: TensorProductProblem) -> list[int]:
    return sorted({path.mul for path in problem.paths}) or [1]


def _path_groups(problem: TensorProductProblem) -> tuple[int, ...]:
    """Every count up to a few more than one an input block, then doubling up to one a path."""
    least, most = len(_multiplicities(problem)), max(1, len(problem.paths))
    blocks = max(least, len({path.in1 for path in problem.paths}))
    doubled = itertools.takewhile(lambda count: count < most, (blocks * 2**power for power in range(16)))
    few = range(least, min(most, blocks + FINE_GROUPS) + 1)
    return tuple(sorted({least, most, *few, *doubled}))


def _host_knobs(problem: TensorProductProblem, dtype: str, facts: DeviceFacts) -> dict[str, tuple]:
    """Vectors from half a machine vector to four, none wider than the channels."""
    lanes = facts.vector_bytes // (4 if dtype == "float32" else 8)
    widest = max(4, 2 * power_of_two_at_most(_multiplicities(problem)[-1]) - 1)
    blocks = [size for size in HostSchedule.choices["channel_block"] if lanes // 2 <= size <= min(widest, 4 * lanes)]
    return {"channel_block": tuple(blocks) or (4,), "threads": threads_of(facts)}


def _cuda_knobs(problem: TensorProductProblem, small: bool, wide: bool) -> dict[str, tuple]:
    """Teams of a quarter of the fewest channels to twice the most; tiles that divide every multiplicity.

    A small team with four channels a lane reads a quarter of the edge values from shared memory: with one channel a
    lane those reads take four times as long as the arithmetic that they feed (128 bytes a cycle and multiprocessor).
    """
    fewest, most = _multiplicities(problem)[0], _multiplicities(problem)[-1]
    teams = tuple(edges for edges in (1, 2, 4, 8) if min(8, fewest / 4) <= 32 // edges < 2 * most)
    return {
        "edges_per_warp": teams or (8,),
        "channels_per_thread": tuple(c for c in (1, 2, 4) if all(mul % c == 0 for mul in _multiplicities(problem))),
        "warps_per_edge": (1, 2, 4, 8, *((16,) if wide else ())),
        "edge_operand": ("inline", "shared", "basis"),
        "stage_edges": (4, 8, 16, 32),
        "prefetch": ("none", "reload", "copy"),
        "ahead": ("none", "weights", "rows", *(("all",) if small else ())),
        "stream": (False, True),
        "block_size": (32, 64, 128, 256, 512),
        "min_blocks": (0, 2, 3, 4, 6, 8),
    }
