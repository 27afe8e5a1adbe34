"""The search space as data: the values that each knob may take for one kernel on one device.

A :class:`Space` is an ordered mapping of knobs to sensible choices. Knobs without effect take their default value
(:meth:`Space.canonical`), so two descriptions of one kernel become the same schedule. :mod:`autotune.search.spaces`
makes a space for each kind of kernel.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from autotune.database.lookup import find_schedule
from autotune.database.nearest import canonical_product, nearest_values
from autotune.errors import ConfigError, unknown_name
from autotune.workload.kinds.base import KernelKind
from autotune.workload.kinds.registry import kernel_kind
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import Schedule

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Space:
    """``knobs`` are in the order in which the sampler chooses them; ``spec.schedule`` is the default schedule.

    spec: as the operation's kind makes it. probes: schedules to measure once each, some outside the choices.
    """

    spec: Any
    knobs: Mapping[str, tuple]
    probes: tuple[Knobs, ...] = ()

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

    def restricted(self, choices: Mapping[str, Sequence]) -> Space:
        """The space with some knobs limited to these values; the default schedule's values always stay."""
        knobs = dict(self.knobs)
        for knob, allowed in choices.items():
            if knob not in knobs:
                raise ConfigError(
                    f"{self.spec.operation} {self.spec.direction.name}: {unknown_name('knob', knob, knobs)}"
                )
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
        assert isinstance(schedule, Schedule)
        if not self.spec.problem.is_channelwise:
            kept = {knob: getattr(schedule, knob) for knob in ("fuse", *self.knobs)}
            return dataclasses.replace(self.default, **kept)
        return canonical_product(self.spec, schedule)

    def plan(self, schedule: Knobs) -> Any:
        """The plan that is compiled for a schedule; ScheduleError if illegal."""
        return self.kind.plan(self.kind.kernel_spec(self.spec, schedule), find_schedule)

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


@dataclass(frozen=True)
class PlainSpace(Space):
    """A space whose knobs all have an effect on every kernel."""

    def canonical(self, schedule: Knobs) -> Knobs:
        return schedule
