"""What a worker process is like, in its own words; nothing heavy is imported before it is needed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What its process is like."""

    def open(self) -> Facts:
        return self

    def surroundings(self) -> tuple[dict[str, str], str]:
        print("said by the process", flush=True)
        return dict(os.environ), os.getcwd()

    def sum_on_threads(self) -> tuple[int, bool, float]:
        """OpenMP's threads do not survive a fork: they would be waited for."""
        import torch

        from kernelgen.runtime import kernel

        torch.set_num_threads(2)
        return torch.get_num_threads(), kernel._forked, torch.ones(1 << 20).sum().item()

    def server(self) -> tuple[int, str | None]:
        return os.getppid(), os.environ.get("OMP_NUM_THREADS")

    def blocked_signals(self) -> list[int]:
        return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    def use_the_device(self) -> float:
        import torch

        return torch.ones(3, device="cuda").sum().item()
