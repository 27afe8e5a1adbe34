"""``equitune bench``: time default, tuned and peers in one run, and export the rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import (
    MEASURING,
    OUTPUT,
    Device,
    Reports,
    Results,
    devices_given,
    examples,
    export_file,
    peers_named,
    results_folder,
    write_pages,
)
from autotune.errors import ConfigError, unknown_name

WHOLE = "Whole models"
EXAMPLES = examples(
    "equitune bench configs/mace-mp-medium.toml --export-markdown bench.md",
    "equitune bench --suite --devices all",
    "equitune bench --models --model mace-mp-0-medium --structure water",
    "equitune bench --models --model mace-mp-0-medium --largest",
)


def bench(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of one in configs/.")
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="Run configs/suite.toml.")] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Time whole models of configs/model-rows.toml, weights random.")
    ] = False,
    orders: Annotated[
        bool, typer.Option("--orders", help="Add the time of ordering a new graph to stored rows that lack it.")
    ] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="With --models: a name, a file, or module:function.", rich_help_panel=WHOLE)
    ] = None,
    structure: Annotated[
        list[str] | None,
        typer.Option(help="With --models: a name of configs/graphs.toml, or a file.", rich_help_panel=WHOLE),
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="With --models: stock, equitune, cuequivariance ...", rich_help_panel=WHOLE)
    ] = None,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", help="With --models: energy_forces, training.", rich_help_panel=WHOLE)
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --models: float32 or float64.", rich_help_panel=WHOLE)] = "float32",
    together: Annotated[
        int, typer.Option(help="With --models: build so many models at a time.", rich_help_panel=WHOLE)
    ] = 1,
    largest: Annotated[
        bool,
        typer.Option("--largest", help="With --models: the largest diamond crystal that fits.", rich_help_panel=WHOLE),
    ] = False,
    most_atoms: Annotated[
        int | None,
        typer.Option(help="With --largest: no more atoms than that; a CPU needs it.", rich_help_panel=WHOLE),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Measure stored rows from before that again, such as 2026-11-26T08:30 (UTC)."
        ),
    ] = None,
    device: Device = None,
    devices: Annotated[
        str | None, typer.Option(help="Split the problems over several devices: all, 0,1 or cpu,cpu (to try it).")
    ] = None,
    peers: Annotated[
        str, typer.Option(help="all, none, or names: e3nn,cuequivariance.", rich_help_panel=MEASURING)
    ] = "all",
    no_peers: Annotated[
        bool, typer.Option("--no-peers", help="The same as --peers none.", rich_help_panel=MEASURING)
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Sampling time of each contender in each pass. Default: 2 with a CONFIG, else 0.3.",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure every row again.", rich_help_panel=MEASURING)] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every step, with the time.", rich_help_panel=OUTPUT)
    ] = False,
    export_markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.", rich_help_panel=OUTPUT)
    ] = None,
    export_json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the rows as JSON, raw samples included.", rich_help_panel=OUTPUT),
    ] = None,
    results: Results = None,
    reports: Reports = None,
) -> None:
    """Time default, tuned, e3nn, cuEquivariance and OpenEquivariance in one run. Nothing is searched.

    An interrupted run continues where it ended. Rows are measured again if generator, schedules or software changed.
    """
    from autotune.errors import ConfigError
    from autotune.workload.toml_tables import config_path

    if models:
        if config is not None or suite or orders or older_than:
            raise ConfigError(
                "--models takes neither a CONFIG nor --suite nor --orders nor --older-than; name models with --model"
            )

        common: dict[str, Any] = {"device": devices_given(device, devices)[0], "dtype": dtype, "fresh": fresh}
        common["folder"] = results_folder(results)
        if largest:
            others = {"--structure": structure, "--pass": passes, "--together": together > 1}
            unused = [name for name, given in (others | {"--seconds": seconds is not None}).items() if given]
            largest_of_whole_models(model or [], contender or [], unused=unused, most_atoms=most_atoms, **common)
            return
        if most_atoms is not None:
            raise ConfigError("--most-atoms belongs to --largest; add it")
        selected = (model or [], structure or [], contender or [], passes or [])
        bench_whole_models(*selected, seconds=seconds, together=together, **common)
        return
    if model or structure or contender or passes or largest or most_atoms is not None:
        names = "--model, --structure, --contender, --pass, --largest and --most-atoms"
        raise ConfigError(f"{names} belong to --models; add it")
    if orders:
        if config is not None or suite or older_than:
            raise ConfigError(
                "--orders takes neither a CONFIG nor --suite nor --older-than; it works on all stored rows"
            )
        from autotune.bench.kernels import add_orders
        from kernelgen.device import device_facts

        place, folder = devices_given(device, devices)[0], results_folder(results)
        add_orders(place, folder, print)
        write_pages(folder, reports, device_facts(place).slug)
        return
    if (given := sum((config is not None, suite, older_than is not None))) != 1:
        raise ConfigError(
            "a CONFIG, --suite and --older-than exclude each other; leave out all but one"
            if given
            else "no CONFIG is given; name one, or type --suite"
        )
    if config is not None:
        config_path(config)
    # Mistakes until here are answered without torch.
    from rich.console import Console

    from autotune.bench.kernels import bench as run_bench
    from autotune.bench.kernels import parse_date
    from autotune.bench.rows import Row, markdown_text, record_text
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    before = None if older_than is None else parse_date(older_than)
    if seconds is not None and not seconds >= 0:
        raise ConfigError(f"--seconds is {seconds}; expected zero or more")
    exports = [
        export_file(*given) for given in (("--export-markdown", export_markdown), ("--export-json", export_json))
    ]
    chosen = devices_given(device, devices)
    facts = device_facts(chosen[0])
    folder = results_folder(results)
    rows = run_bench(
        before or load_config(config or "suite", facts.backend),
        chosen[0],
        folder,
        devices=chosen,
        peers=() if no_peers else peers_named(peers),
        seconds_each=(2.0 if config else 0.3) if seconds is None else seconds,
        fresh=fresh,
        console=Console(),
        verbose=verbose,
    )
    texts: tuple[Callable[[list[Row]], str], ...] = (markdown_text, functools.partial(record_text, facts))
    for path, text in zip(exports, texts, strict=True):
        if path is not None:
            path.write_text(text(rows), encoding="utf-8")
            print(f"export: {path}")
    write_pages(folder, reports, facts.slug)


# ``equitune bench --models``: whole models by stock, by the packages' own fast paths, and by Equitune.
#
# The record is ``results/models/DEVICE.json``.


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
