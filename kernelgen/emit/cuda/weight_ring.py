"""A ring buffer of weights in shared memory, as C++ text: asynchronous copies, some edges ahead.

A team copies its paths' weights of an edge in pieces of 16 bytes, one a lane and copy, and later reads them from shared
memory. So loads of several edges are in flight at a time, and none of them holds a register.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.plan.channelwise import Plan, ring_row
from kernelgen.plan.path_groups import Group
from kernelgen.schedule.kernel_spec import BYTES


class WeightRing:
    """The ring of one group. ``before``: elements before it in the team's shared memory."""

    def __init__(self, plan: Plan, group: Group, paths: list[int], before: int) -> None:
        self.plan, self.group, self.paths, self.before = plan, group, paths, before
        self.depth, self.row = plan.ring, ring_row(plan, group)
        self.lanes, self.piece = plan.lanes, 16 // BYTES[plan.spec.dtype]

    def begin(self) -> list[str]:
        """Once a group: define the ring and the lane's place within the pieces of one copy."""
        pieces = self.plan.tile // self.piece
        lines = [f"Real* const ring = stage + {self.before};"]
        if pieces < self.lanes:
            lines.append(f"const int ring_path = team.lane / {pieces};")
        return [*lines, f"const int ring_place = team.lane % {min(pieces, self.lanes)} * {self.piece};"]

    def fill(self) -> list[str]:
        """Before the first edge of a stage: start the copies for the first edges."""
        lines = []
        for slot in range(self.depth):
            lines += [f"const int ring_edge{slot} = team.broadcast(my_edge, {slot});", f"if ({slot} < count) {{"]
            lines += [*self._fetch(f"ring_edge{slot}", str(slot)), "}", "end_fetch();"]
        return lines

    def wait(self) -> list[str]:
        """At the start of an edge: wait until its row has arrived for all lanes."""
        return [
            f"await_fetches<{self.depth - 1}>();",
            "team.sync();",
            f"const Real* const fetched = ring + j % {self.depth} * {self.row};",
        ]

    def refill(self) -> list[str]:
        """At the end of an edge: start the copy for the edge that takes its slot."""
        return [
            f"const int later = team.broadcast(my_edge, j + {self.depth});",
            "team.sync();",
            f"if (j + {self.depth} < count) {{",
            *self._fetch("later", f"j % {self.depth}"),
            "}",
            "end_fetch();",
        ]

    def load(self, p: int) -> Iterator[str]:
        """Read the lane's channels of a path's weights."""
        channels = self.plan.tile // self.lanes
        for number, name in enumerate(self.plan.weight_operands):
            place = (number * len(self.paths) + self.paths.index(p)) * self.plan.tile
            yield f"Real ring_{name}{p}[C];"
            yield f"load<{min(channels, self.piece)}>(fetched + {place} + team.lane * C, ring_{name}{p});"

    def _fetch(self, edge: str, slot: str) -> Iterator[str]:
        """Copy the rows of an edge, 16 bytes a lane at a time."""
        problem, tile = self.plan.spec.problem, self.plan.tile
        pieces = tile // self.piece  # pieces of a path
        together, rounds = max(1, self.lanes // pieces), max(1, pieces // self.lanes)
        for number, name in enumerate(self.plan.weight_operands):
            row = f"b.{name} + (long long){edge} * {problem.weight_numel}"
            yield f"    const Real* const from_{name} = {row} + first_channel;"
            for first in range(0, len(self.paths), together):
                chosen = self.paths[first : first + together]
                offsets = [problem.paths[p].weight_offset for p in chosen]
                guard = f"if (ring_path < {len(chosen)}) " if len(chosen) < together else ""
                for turn in range(rounds):
                    step = turn * self.lanes * self.piece
                    place = (number * len(self.paths) + first) * tile + step
                    to = f"ring + {slot} * {self.row} + {place} + team.lane * {self.piece}"
                    yield f"    {guard}fetch16({to}, from_{name} + {_chosen(offsets)} + {step} + ring_place);"


def _chosen(offsets: list[int]) -> str:
    """The weight offset of the lane's path, as a C++ expression; ``offsets``: of the paths that are copied together."""
    steps = {b - a for a, b in zip(offsets, offsets[1:], strict=False)}
    if not steps:
        return str(offsets[0])
    if len(steps) == 1:
        return f"{offsets[0]} + ring_path * {steps.pop()}"
    text = str(offsets[-1])
    for number, offset in reversed(list(enumerate(offsets[:-1]))):
        text = f"ring_path == {number} ? {offset} : {text}"
    return f"({text})"
