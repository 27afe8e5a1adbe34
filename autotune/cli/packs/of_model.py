"""A pack of the kernels that a model runs, found by running it."""

from __future__ import annotations

from pathlib import Path

from autotune.cli.packs.certificates import certificates
from autotune.tune.from_model.opened import open_named
from kernelgen.packs.make import Written
from kernelgen.packs.recorded import recording


def write_of_model(
    model: str, structure: str | None, path: Path, *, dtype: str | None, training: bool, cpu: str | None
) -> Written:
    """Open, accelerate and run a model (as ``equitune tune --model``) on the CPU, and write its kernels."""
    opened = open_named(model, structure, "cpu", dtype, training)
    with recording(path, cpu=cpu, certificates=certificates()) as recorded:
        for run in opened.passes.values():
            run()
    return recorded.written
