"""The base of all schedules: knobs with plain values, written to a dictionary and read back.

A schedule holds numbers and names only, never C text. ``choices`` lists the values of each knob. Limits that depend on
the problem are checked in one place, :func:`kernelgen.kernels.dispatch.make_plan`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kernelgen.errors import ScheduleError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Knobs:
    """Base of all schedules: each knob has one of its ``choices``."""

    backend: ClassVar[str] = ""
    choices: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # Knobs added later. Texts omit them at their default value, so that older records and kernels stay valid.
    younger: ClassVar[tuple[str, ...]] = ()

    # The choices with their types: 1 is no True, and 4.0 no 4.
    _typed: ClassVar[dict[str, frozenset[Any]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._typed = {name: frozenset((type(a), a) for a in allowed) for name, allowed in cls.choices.items()}

    def __post_init__(self) -> None:
        for name, known in self._typed.items():
            value = getattr(self, name)
            # A list, as a file may have, cannot be looked up.
            if type(value) in (list, dict) or (type(value), value) not in known:
                allowed = self.choices[name]
                shown = f"{allowed[0]}..{allowed[-1]}" if len(allowed) > 12 else allowed
                raise ScheduleError(f"{type(self).__name__}.{name} is {value!r}; expected one of {shown}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data with the backend's name; :func:`read_schedule` reads it back."""
        return {"backend": self.backend, **self._named()}

    @property
    def key(self) -> str:
        """Stable text of one line, equal for equal schedules."""
        return self.backend + ":" + ",".join(f"{k}={v}" for k, v in self._named().items())

    def _named(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        unnamed = [field.name for field in fields if field.name in self.younger and values[field.name] == field.default]
        return {name: value for name, value in values.items() if name not in unnamed}

    @property
    def canonical(self) -> Self:
        """The schedule with knobs that have no effect beside its others at their defaults."""
        return self

    def for_degree(self, share: float) -> Self:
        """The schedule adapted to graphs with ``share`` times as many edges a node."""
        return self

    def for_skew(self) -> Self:
        """The schedule adapted to graphs of which one node has far more edges than others."""
        return self

    def for_layout(self, layout: str) -> Self:
        """The schedule, found with another layout of node features, adapted to ``layout``."""
        return self


Kind = TypeVar("Kind", bound=Knobs)


def read_schedule(data: Mapping[str, Any], kinds: Mapping[str, type[Kind]]) -> Kind:
    """The schedule that ``to_dict`` wrote, as the dataclass of its backend in ``kinds``."""
    knobs = dict(data)
    backend = knobs.pop("backend", None)
    if backend not in kinds:
        raise ScheduleError(f"schedule backend is {backend!r}; expected one of {tuple(kinds)}")
    known = [field.name for field in dataclasses.fields(kinds[backend])]
    for name in knobs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {tuple(known)}"
            raise ScheduleError(f"unknown knob {name!r} for {backend}; {hint}")
    return kinds[backend](**knobs)


def power_of_two_at_most(number: float) -> int:
    """The largest power of two that does not exceed ``number`` (at least 1)."""
    return 1 << max(0, math.floor(math.log2(max(1.0, number))))
