"""``equitune bench --orders``: time the ordering of the graphs of stored rows, without measuring the rows again.

Every comparison measures what each contender does once for a new graph. Rows from before it did lack that figure; it
depends on the graph and on what the schedules need alone, so it is measured here once for all rows that share both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.bench.again import workload_key, workload_of
from autotune.bench.rows import DEFAULT, OURS, Row, store_rows, stored_rows
from autotune.compare.peers import ADAPTERS
from autotune.database.maintenance import now_text
from autotune.measure.operations import new_graph, order_ms, runs_of
from autotune.workload.config import load_graphs
from autotune.workload.graphs import build_graph
from autotune.workload.kinds.registry import CONVOLUTIONS
from autotune.workload.workload import Workload
from kernelgen.device import device_facts
from kernelgen.errors import EquituneError


def add_orders(device: str, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Add ``order_ms`` and its date to the device's rows of convolutions that lack it; returns these rows."""
    facts = device_facts(device)
    lacking = [row for row in stored_rows(folder, facts) if row["operation"] in CONVOLUTIONS and "order_ms" not in row]
    timing, graphs, done = _Orders(device), load_graphs(), []
    for _, group in itertools.groupby(sorted(lacking, key=workload_key), key=workload_key):
        rows = list(group)
        try:
            found = timing.of(rows, workload_of(rows, graphs))
        except EquituneError as error:
            say(f"{rows[0]['label']} on {rows[0]['graph']['name']}: left out, {error}")
            continue
        done += [row | {"order_ms": found, "order_date": now_text()} for row in rows]
    store_rows(folder, facts, done)
    say(f"{len(done)} of {len(lacking)} rows without the time of ordering their graph have it now")
    return done


@dataclass
class _Orders:
    """Times of ordering, milliseconds, by graph and by what is done."""

    device: str
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def of(self, rows: Iterable[Row], workload: Workload) -> dict[str, float]:
        """By contender that has a time in one of the rows of a workload."""
        rows = list(rows)
        timed = {name for row in rows for name, result in row["times"].items() if "error" not in result}
        peers = {adapter.name: adapter.order for adapter in ADAPTERS if workload.operation in adapter.operations}
        found = {name: self._time(workload, name, order) for name, order in peers.items() if name in timed}
        for name in timed & {OURS, DEFAULT}:
            read = workload.kind.read
            schedules = {key: read(knobs) for row in rows for key, knobs in row["schedules"][name].items()}
            operator = runs_of(workload.operation).build(workload, schedules, self.device)
            product = getattr(operator, "product", operator)
            order = new_graph(operator, build_graph(workload.graph).num_nodes)
            found[name] = self._time(workload, (product.by_receiver, product.by_sender), order)
        return found

    def _time(self, workload: Workload, what: Any, order: Any) -> float:
        key = (workload.graph.name, what)
        if key not in self.known:
            graph = build_graph(workload.graph)
            self.known[key] = order_ms(order, graph.sender.to(self.device), graph.receiver.to(self.device))
        return self.known[key]
