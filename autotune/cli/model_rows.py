"""``equitune bench --models``: whole models by stock, by the packages' own fast paths, and by Equitune.

The record is ``results/models/DEVICE.json``.
"""

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
    """Time steps, and print them."""
    from autotune.bench.model_rows import table_lines
    from autotune.bench.session import PASSES, Effort
    from autotune.bench.whole_models import Request, bench_models

    for name in passes:
        if name not in PASSES:
            raise ConfigError(unknown_name("pass", name, PASSES))
    _require_dtype(dtype)
    if together < 1:
        raise ConfigError(f"--together is {together}; expected a positive number of models")
    effort = Effort() if seconds is None else Effort(seconds=seconds / 2, warm_up_s=2 * seconds)
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
    rows = bench_models(request, folder, _say)
    _conclude("times a step; ratios to Equitune's: above 1 it is faster", table_lines(rows), folder, device)


def largest_of_whole_models(
    models: Sequence[str],
    contenders: Sequence[str],
    *,
    unused: Sequence[str],
    device: str,
    dtype: str,
    fresh: bool,
    most_atoms: int | None,
    folder: Path,
) -> None:
    """Double a crystal until it does not fit, and print the largest that did. ``unused``: options that say nothing."""
    from autotune.bench.largest import LargestRequest, largest_crystals, table_lines

    if unused:
        raise ConfigError(
            f"--largest does not go with {', '.join(unused)}: it takes one step of energies, forces and stress of each "
            "size of a diamond crystal, one model after the other; leave them out"
        )
    _require_dtype(dtype)
    request = LargestRequest(tuple(models), tuple(contenders), device, dtype, fresh, most_atoms)
    rows = largest_crystals(request, folder, _say)
    about = "largest diamond crystal that fits: energies, forces and stress of one step"
    _conclude(about, table_lines(rows), folder, device)


def _require_dtype(dtype: str) -> None:
    from autotune.models.whole_model import DTYPES

    if dtype not in DTYPES:
        raise ConfigError(unknown_name("dtype", dtype, DTYPES))


def _conclude(about: str, lines: Sequence[str], folder: Path, device: str) -> None:
    from autotune.bench.model_rows import rows_path
    from kernelgen.device import device_facts

    for line in ["", about, *lines, f"record: {rows_path(folder, device_facts(device).slug)}"]:
        _say(line)


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, markup=False, highlight=False, soft_wrap=True)
