"""What untuned schedules would give against other libraries: the suite's rows, each slower by what its choice costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autotune.bench.rows import OURS, Row
from autotune.bench.text import peer_times

# A row is lost if the fastest peer takes less than this many times our time.
LOST = 0.95


# Where a row of the record has the cost of the model's choice, and of what a first run keeps.
BY_MODEL, BY_FIRST_RUN = 7, 10


def against_peers(bench: Iterable[Row], choices: Sequence[Sequence[Any]], cost: int = BY_MODEL) -> dict[str, Any]:
    """Single passes of the suite with an untuned choice: how many, how many lost, and the least ratio with its row.

    A ratio is the fastest peer's time over our tuned time, divided by the choice's cost. choices: of the record's
    ``rows``; cost: the place of the cost that counts. Passes of several kernels, deterministic rows, and those without
    a study or a peer are left out.
    """
    costs = {tuple(choice[:6]): float(choice[cost]) for choice in choices}
    found = []
    for row in bench:
        name = tuple(row[key] for key in ("label", "operation", "pass", "dtype", "layout", "graph_class"))
        peers, ours = peer_times(row), row["times"][OURS]
        if name in costs and peers and "error" not in ours and not row.get("deterministic", False):
            found.append((min(peers.values()) / ours["time_us"] / costs[name], name))
    if not found:
        return {"rows": 0, "lost": 0}
    least, name = min(found)
    lost = sum(ratio < LOST for ratio, _ in found)
    return {"rows": len(found), "lost": lost, "least": round(least, 4), "least row": list(name)}
