"""An idle worker process: slow imports are done, and nothing is on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.measure.trial import free_memory
from autotune.workload.kinds.base import Problem
from autotune.workload.workload import Workload


@dataclass(frozen=True)
class IdleProcess:
    """An idle process: modules are imported and e3nn's product is built on the host; nothing is on the device.

    first: a workload to prepare: ``peers`` are built for it too, and run ``passes`` on a small graph.
    """

    problem: Problem
    device: str
    first: Workload | None = None
    peers: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    def open(self) -> Callable[[Any], Any]:
        from autotune.compare import comparison_worker  # noqa: F401
        from autotune.measure import timing  # noqa: F401
        from autotune.measure.references import build_ahead

        build_ahead(self.problem)
        if self.first is not None:
            from autotune.compare.precompile import build_peers

            build_peers(self.first, self.device, self.peers, self.passes)
        free_memory(self.device)
        gc.freeze()  # later collections need not scan what stays
        return lambda job: None
