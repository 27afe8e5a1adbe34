"""A path group's loop over a run of edges, as C++ text: staged indices and edge values, prefetched rows.

:meth:`EdgeWalk._edge` writes the body of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kernelgen.emit.cuda.edge_operand import EdgeOperand, EdgeSums
from kernelgen.emit.cuda.memory_access import NODE_BUFFERS, Facts, GroupMemory
from kernelgen.emit.cuda.weight_ring import WeightRing
from kernelgen.plan.channelwise import stage_stride, sums_elements, value_elements
from kernelgen.plan.path_groups import Group


class EdgeWalk:
    """The loop over edges of one path group."""

    def __init__(self, kernel: Facts, number: int, group: Group) -> None:
        self.kernel, self.number, self.group = kernel, number, group
        self.first_unit = sum(kernel.plan.tiles(before) for before in kernel.plan.groups[:number])
        self.plan, self.problem = kernel.plan, kernel.plan.spec.problem
        self.near, self.owner = self.plan.near, self.plan.owner
        self.lines: list[str] = []
        self.depth = 1
        # Paths of one input block are consecutive, so that its gradient is complete after the last of them.
        self.paths = sorted(group.paths, key=lambda p: (self.problem.paths[p].in1, p))
        self.memory = GroupMemory(kernel, group, self.paths)
        self.operand = EdgeOperand(kernel, self.paths, stage_stride(kernel.plan, group))
        self.y_sums = EdgeSums(kernel.plan)
        self.ring = WeightRing(self.plan, group, self.paths, value_elements(self.plan)) if self.plan.ring else None
        self.sums = sums_elements(kernel.plan)
        # Statements before the first write to memory.
        self.await_zeros: tuple[str, ...] = ()
        self.not_awaited: tuple[str, ...] = ()
        if kernel.schedule.zeros == "inside":
            self.not_awaited = ("bool awaited = false;",)
            self.await_zeros = ("if (!awaited) await_zeros(b.ready, b.launch);", "awaited = true;")

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    @contextmanager
    def scope(self, opening: str) -> Iterator[None]:
        self.put(opening + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self.put("}")

    def _edge(self) -> None:
        """Write the body of the loop, for one edge whose row is loaded."""
        raise NotImplementedError

    def _walk(self) -> None:
        kernel, prefetch = self.kernel, self.kernel.schedule.prefetch != "none"
        by_destination = not self.owner and not kernel.plain and bool({"g", "tg"} & {*kernel.live, *kernel.operands})
        copies = kernel.schedule.prefetch == "copy"
        self.put(*self.not_awaited)
        if by_destination:
            self.put("int destination = -1;")
        if self.plan.stores_whole_rows:
            self.put(
                "// Whether the row of the first edge is cut, and that of the last one.",
                "bool cut = begin > 0 && is_one_row(b.receiver, b.perm, begin - 1, begin);",
                "const bool goes_on = end < b.num_edges && is_one_row(b.receiver, b.perm, end - 1, end);",
            )
        if self.ring:
            self.put(*self.ring.begin())
        with self.scope("for (int base = begin; base < end; base += STAGE)"):
            self._stage(by_destination)
            if self.ring:
                self.put(*self.ring.fill())
            self.put(f"Row{self.number} row{', next_row' if copies else ''};")
            if prefetch:
                self.put("const int first = team.broadcast(my_edge, 0), first_far = team.broadcast(my_far, 0);")
                self._load_row("next_row." if copies else "row.", "first", "first_far")
            with self.scope("for (int j = 0; j < count; ++j)"):
                self.put("const int edge = team.broadcast(my_edge, j), far = team.broadcast(my_far, j);")
                if prefetch:
                    self._prefetch(copies)
                else:
                    self._load_row("row.", "edge", "far")
                if by_destination:
                    self._change_destination()
                if self.ring:
                    self.put(*self.ring.wait())
                self.put(*self.await_zeros)
                self._edge()
                if self.ring:
                    self.put(*self.ring.refill())
            if self.plan.joins_y:
                self.put(*self.y_sums.join())
            elif kernel.staged:
                self.put("team.sync();")

    def _prefetch(self, copies: bool) -> None:
        """Write the next edge's indices. With ``copy``, take over its row first: only this waits for the loads."""
        self.put("const int next = team.broadcast(my_edge, j + 1), next_far = team.broadcast(my_far, j + 1);")
        self.put("const bool more = j + 1 < count;")
        if copies:
            self.put("row = next_row;")
            with self.scope("if (more)"):
                self._load_row("next_row.", "next", "next_far")

    def _stage(self, by_destination: bool) -> None:
        """One edge a lane: its indices, and its edge values."""
        kernel = self.kernel
        self.put("const int count = min(STAGE, end - base);", "// one edge a lane: its indices, and its edge values")
        self.put("int my_edge = 0, my_far = 0;" + (" int my_destination = 0;" if by_destination else ""))
        with self.scope("if (team.lane < count)"):
            self.put("my_edge = base + team.lane;")
            if self.owner or self.plan.spec.permuted or self.plan.stores_whole_rows:
                self.put("if (b.perm) my_edge = b.perm[my_edge];")
            far = "receiver" if self.near == "in1" else "sender"
            self.put("my_far = my_edge;" if kernel.plain else f"my_far = int(b.{far}[my_edge]);")
            if by_destination:
                self.put("my_destination = int(b.receiver[my_edge]);")
            self.put(*self.memory.ask("my_edge", "my_far"))
            if kernel.staged:
                self.put(*self.operand.stage())
        if kernel.staged:
            self.put("team.sync();")

    def _load_row(self, into: str, edge: str, far: str) -> None:
        """Load all that an edge needs from memory except its y row."""
        for side in NODE_BUFFERS:
            if side != self.near:
                self.put(*self.memory.load_node(side, into, far))
        if not (self.problem.shared_weights or self.ring):
            self.put(*self.memory.load_weights(into, edge))

    def _reload(self, p: int) -> None:
        """Load the next edge's data into the registers that path p was the last to read."""
        loads: list[str] = []
        for side, blocks in (("in1", self.group.in1), ("out", self.group.out)):
            for b in blocks if side != self.near else ():
                if p == [q for q in self.paths if getattr(self.problem.paths[q], side) == b][-1]:
                    loads += self.memory.load_node(side, "row.", "next_far", only=b)
        if not (self.problem.shared_weights or self.ring):
            loads += self.memory.load_weights("row.", "next", only=p)
        if loads:
            with self.scope("if (more)"):
                self.put(*loads)

    def _change_destination(self) -> None:
        self.put("const int next_destination = team.broadcast(my_destination, j);")
        with self.scope("if (next_destination != destination)"):
            if "g" in self.kernel.live:
                with self.scope("if (destination >= 0)"):
                    self._put_destination()
                    self.put(*(f"clear(og{b});" for b in self.group.out))
            self.put("destination = next_destination;")
            self.put(*self.memory.load_node("out", "", "destination"))

    def _put_destination(self) -> None:
        """Add the sums to the row of the edges' destination, or store them where all of its edges are in this run."""
        if not self.plan.stores_whole_rows:
            self.put(*self.memory.flush("out", "destination", owned=False))
            return
        with self.scope("if (cut)"):
            self.put("await_zeros(b.ready, b.launch);")
            self.put(*self.memory.flush("out", "destination", owned=False))
        with self.scope("else"):
            self.put(*self.memory.flush("out", "destination", owned=True))
        self.put("cut = false;")
