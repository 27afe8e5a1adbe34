"""The picker of a page: a row that a reader chooses, as bars of its contenders, facts and the command to measure it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A bar this many times as long as the next is cut, so that the others can still be told apart.
CUT = 4.0


@dataclass(frozen=True)
class Bar:
    """One contender. role: what it is in the comparison. ink: its colour. memory: bytes. reason: why it has no time.

    ours: another form of the first bar's contender, not compared with it.
    """

    role: str
    name: str
    ink: str
    time_us: float
    memory: float = math.nan
    reason: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Command:
    """What to type, if a command is enough, and what is to be said of it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """A row to choose. keys: its value on each axis of the picker. bars: Equitune's first. facts: short sentences."""

    keys: tuple[str, ...]
    bars: tuple[Bar, ...]
    facts: tuple[str, ...]
    command: Command | None = None

    @property
    def longest_us(self) -> float:
        """The time of a bar of full length: those that take longer are cut."""
        times = sorted(bar.time_us for bar in self.bars if not math.isnan(bar.time_us))
        if len(times) > 1 and times[-1] > CUT * times[-2]:
            return CUT / 2 * times[-2]
        return times[-1] if times else math.nan

    @property
    def has_memory(self) -> bool:
        return any(not math.isnan(bar.memory) for bar in self.bars)

    def ratio(self, bar: Bar) -> float:
        """How many times as fast as a bar Equitune is."""
        return bar.time_us / self.bars[0].time_us

    def width(self, bar: Bar) -> float:
        """In percent."""
        return 100 * min(1.0, bar.time_us / self.longest_us)

    def is_cut(self, bar: Bar) -> bool:
        return bar.time_us > self.longest_us * (1 + 1e-9)


@dataclass(frozen=True)
class Picker:
    """name: unique on a page. first: the place of the choice to show first. memory: the head of that column."""

    name: str
    axes: tuple[str, ...]
    choices: tuple[Choice, ...]
    first: int
    memory: str
