"""A pack of the kernels that a model runs, found by running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from autotune.cli.packs.certificates import certificates
from autotune.errors import ConfigError
from autotune.tune.model_passes import open_named
from kernelgen.packs.write import Written, recording


def write_of_model(
    model: str,
    structure: str | None,
    path: Path,
    *,
    dtype: str | None,
    training: bool,
    cpu: str | None,
    archs: Sequence[str] = (),
) -> Written:
    """Open, accelerate and run a model (as ``equitune tune --model``), and write its kernels.

    On the CPU, or with ``archs`` on this machine's GPU, whose kernels are then compiled for each of them and for the
    GPU itself. ConfigError if there is none.
    """
    if archs and not torch.cuda.is_available():
        raise ConfigError(
            f"--arch {','.join(archs)}: the kernels of a model are found by running it, and this machine has no GPU; "
            "pack the model where there is one, or its problems by name"
        )
    with recording(path, cpu=cpu, archs=archs, certificates=certificates()) as recorded:
        # Replaced modules are compared with the package's own, which loads kernels too.
        opened = open_named(model, structure, "cuda" if archs else "cpu", dtype, training)
        for run in opened.passes.values():
            run()
    return recorded.written
