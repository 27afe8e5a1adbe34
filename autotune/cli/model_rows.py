"""``equitune bench --models``: time whole models by stock, by the packages' own fast paths, and by Equitune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import ConfigError, unknown_name


def bench_whole_models(
    models: Sequence[str],
    structures: Sequence[str],
    contenders: Sequence[str],
    passes: Sequence[str],
    *,
    device: str,
    dtype: str,
    seconds: float | None,
    together: int,
    fresh: bool,
    folder: Path,
) -> None:
    """Measure and print; the record is ``results/models/DEVICE.json``."""
    from rich.console import Console

    from autotune.bench.models.measuring import Effort
    from autotune.bench.models.rows import rows_path
    from autotune.bench.models.run import Request, bench_models
    from autotune.bench.models.session import PASSES
    from autotune.bench.models.text import table_lines
    from autotune.models.whole_model import DTYPES
    from kernelgen.device import device_facts

    for name in passes:
        if name not in PASSES:
            raise ConfigError(unknown_name("pass", name, PASSES))
    if dtype not in DTYPES:
        raise ConfigError(unknown_name("dtype", dtype, DTYPES))
    if together < 1:
        raise ConfigError(f"--together is {together}; expected a positive number of models")
    effort = Effort() if seconds is None else Effort(seconds=seconds / 2, warm_up_s=2 * seconds)
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    request = Request(
        tuple(models),
        tuple(structures),
        tuple(contenders),
        tuple(name for name in PASSES if name in passes or not passes),
        device,
        dtype,
        effort,
        fresh,
        together,
    )
    rows = bench_models(request, folder, say)
    for line in ["", "times a step; ratios to Equitune's: above 1 it is faster", *table_lines(rows)]:
        say(line)
    say(f"record: {rows_path(folder, device_facts(device).slug)}")
