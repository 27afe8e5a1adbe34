"""``equitune bench``: the ``kernels`` of a config, whole ``models`` and the ``largest`` crystals, each beside peers.

Of stored rows of kernels ``again`` measures old ones, and ``orders`` adds the time of ordering their graphs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from datetime import datetime


# Sampling of the suite, and of rows that are measured again, which are hundreds; of any other config.
SHORT_S, LONG_S = 0.3, 2.0


class BenchGroup(options.Group):
    usual = "kernels"
    old = {
        "--models --largest": "largest",
        "--models": "models",
        "--orders": "orders",
        "--older-than": "again",
        "--suite": "suite",
    }
    unread = {"models": ("--reports", "--peers"), "largest": ("--reports", "--peers")}


app = typer.Typer(
    cls=BenchGroup,
    help="Time Equitune beside its peers. With a CONFIG: the kernels of its workloads, as `equitune bench kernels`.",
    subcommand_metavar="CONFIG | COMMAND [ARGS]...",
)

Devices = Annotated[
    str | None, options.option("Split the problems over several devices: all, 0,1 or cpu,cpu (to try it).")
]
PeerNames = Annotated[str, options.measuring("all, none, or names: e3nn,cuequivariance.")]
Budget = Annotated[
    str | None,
    options.measuring(
        "Time limit of the whole run, with units: 90s, 10m, 1h30m. The same command goes on with what is left."
    ),
]
Seconds = Annotated[
    float | None, options.measuring("Sampling time of each contender in each pass. Default: 2, of many rows 0.3.")
]
Energy = Annotated[bool, options.measuring("Measure the joules of a call too (NVML); 2 s more each.", "--energy")]
Fresh = Annotated[bool, options.measuring("Measure every row again.", "--fresh")]
Verbose = Annotated[bool, options.output("Print every step, with the time.", "--verbose")]
Markdown = Annotated[Path | None, options.output("Write the table as Markdown.", "--export-markdown", metavar="FILE")]
Record = Annotated[
    Path | None, options.output("Write the rows as JSON, raw samples included.", "--export-json", metavar="FILE")
]
Model = Annotated[
    list[str] | None,
    options.option("A name, a file, or module:function. Repeat it for several. Default: all that are installed."),
]
Contender = Annotated[
    list[str] | None, options.option("stock, equitune, cuequivariance ... Repeat it for several. Default: all.")
]
Dtype = Annotated[str, options.option("float32 or float64.")]


@app.command(
    epilog=options.examples(
        "equitune bench configs/mace-mp-medium.toml --export-markdown bench.md", "equitune bench suite --devices all"
    )
)
def kernels(
    config: Annotated[str, options.argument("CONFIG", options.CONFIG_HELP)],
    device: options.Device = None,
    devices: Devices = None,
    peers: PeerNames = "all",
    no_peers: options.NoPeers = False,
    budget: Budget = None,
    seconds: Seconds = None,
    fresh: Fresh = False,
    energy: Energy = False,
    verbose: Verbose = False,
    watch: options.Watch = False,
    export_markdown: Markdown = None,
    export_json: Record = None,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Time equitune, equitune-default, e3nn, cuEquivariance and OpenEquivariance in one run. Nothing is searched.

    equitune is what a model would load here: tuned, or without an entry the best known; a line below the table says so.
    An interrupted run continues where it ended. Rows are measured again if generator, schedules, software or the file
    of a peer changed.
    """
    from autotune.workload.toml_tables import config_path

    limits = {"begin": time.monotonic(), "budget": options.budget_seconds(budget)}
    config_path(config)
    chosen = () if no_peers else options.peers_named(peers)
    seconds_each = (SHORT_S if config == "suite" else LONG_S) if seconds is None else seconds
    how = {"peers": chosen, "seconds_each": seconds_each, "fresh": fresh, "energy": energy, "verbose": verbose}
    if watch and devices is not None:
        raise ConfigError("--watch shows one device; leave out --devices, or --watch")
    how |= {"watch": watch}
    _compare(config, device, devices, export_markdown, export_json, results, reports, **how, **limits)


@app.command(epilog=options.examples("equitune bench again 2026-11-26"))
def again(
    before: Annotated[
        str, options.argument("DATE", "Such as 2026-11-26 or 2026-11-26T08:30, in UTC.", show_default=False)
    ],
    device: options.Device = None,
    devices: Devices = None,
    peers: PeerNames = "all",
    no_peers: options.NoPeers = False,
    budget: Budget = None,
    seconds: Seconds = None,
    energy: Energy = False,
    verbose: Verbose = False,
    export_markdown: Markdown = None,
    export_json: Record = None,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Measure all stored rows from before a date again, by one set of code."""
    from autotune.bench.kernels import parse_date

    limits = {"begin": time.monotonic(), "budget": options.budget_seconds(budget)}
    chosen, seconds_each = () if no_peers else options.peers_named(peers), SHORT_S if seconds is None else seconds
    what = parse_date(before)
    how = {"peers": chosen, "seconds_each": seconds_each, "fresh": True, "energy": energy, "verbose": verbose}
    _compare(what, device, devices, export_markdown, export_json, results, reports, **how, **limits)


def _compare(
    what: str | datetime,
    device: str | None,
    devices: str | None,
    export_markdown: Path | None,
    export_json: Path | None,
    results: Path | None,
    reports: Path | None,
    **how: Any,
) -> None:
    """Compare what a config says, or stored rows from before a date; export the rows, and write the device's page.

    how: as of :func:`autotune.bench.kernels.bench`, the budget with the time for the page.
    """
    # Mistakes until here are answered without torch.
    from rich.console import Console

    from autotune.bench.kernels import bench
    from autotune.bench.rows import markdown_text, record_text
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    if not how["seconds_each"] >= 0:
        raise ConfigError(f"--seconds is {how['seconds_each']}; expected zero or more")
    options.export_file("--export-markdown", export_markdown)
    options.export_file("--export-json", export_json)
    chosen, folder = options.devices_given(device, devices), options.results_folder(results)
    facts = device_facts(chosen[0])
    loaded = load_config(what, facts.backend) if isinstance(what, str) else what
    if how["budget"] is not None:
        how["budget"] -= options.PAGES_S
    page = options.watched(folder, reports, facts.slug) if how.pop("watch", False) else nullcontext()
    with page as live:
        how |= {"watch": live.add} if live else {}
        rows = bench(loaded, chosen[0], folder, console=Console(), devices=chosen, **how)
    for path, text in ((export_markdown, markdown_text), (export_json, lambda rows: record_text(facts, rows))):
        if path is not None:
            path.write_text(text(rows), encoding="utf-8")
            print(f"export: {path}")
    options.write_pages(folder, reports, facts.slug)


@app.command()
def orders(device: options.Device = None, results: options.Results = None, reports: options.Reports = None) -> None:
    """Add the time of ordering a new graph to stored rows that lack it."""
    from autotune.bench.kernels import add_orders
    from kernelgen.device import device_facts

    place, folder = options.resolve_device(device), options.results_folder(results)
    add_orders(place, folder, print)
    options.write_pages(folder, reports, device_facts(place).slug)


@app.command(epilog=options.examples("equitune bench models --model mace-mp-0-medium --structure water"))
def models(
    model: Model = None,
    structure: Annotated[
        list[str] | None, options.option("A name of configs/graphs.toml, or a file. Repeat it for several.")
    ] = None,
    contender: Contender = None,
    passes: Annotated[
        list[str] | None,
        options.option("energy_forces, energy_forces_stress, training or md_step. Default: all.", "--pass"),
    ] = None,
    dtype: Dtype = "float32",
    together: Annotated[int, options.option("Build so many models at a time: faster, with more memory.")] = 1,
    device: options.Device = None,
    seconds: Annotated[float | None, options.measuring("Sampling time of each contender in each row.")] = None,
    fresh: Fresh = False,
    watch: options.Watch = False,
    results: options.Results = None,
) -> None:
    """Time steps of whole models (configs/model-rows.toml, weights random) by every path that is installed.

    Stock, the packages' own fast paths and Equitune. The record is results/models/DEVICE.json.
    """
    from autotune.bench.model_rows import table_lines
    from autotune.bench.session import PASSES, Effort
    from autotune.bench.whole_models import Request, bench_models
    from kernelgen.device import device_facts

    for name in passes or ():
        if name not in PASSES:
            raise ConfigError(unknown_name("pass", name, PASSES))
    _require_dtype(dtype)
    if together < 1:
        raise ConfigError(f"--together is {together}; expected a positive number of models")
    request = Request(
        tuple(model or ()),
        tuple(structure or ()),
        tuple(contender or ()),
        passes=tuple(name for name in PASSES if not passes or name in passes),
        device=options.resolve_device(device),
        dtype=dtype,
        effort=Effort() if seconds is None else Effort(seconds=seconds / 2, warm_up_s=2 * seconds),
        fresh=fresh,
        together=together,
    )
    folder = options.results_folder(results)
    with options.watched(folder, None, device_facts(request.device).slug) if watch else nullcontext() as live:

        def say(text: str) -> None:
            _say(text)
            if live:
                live.add(text)

        rows = bench_models(request, folder, say)
        say(f"{len(rows)} rows")
    _conclude("times a step; ratios to Equitune's: above 1 it is faster", table_lines(rows), folder, request.device)


@app.command(epilog=options.examples("equitune bench largest --model mace-mp-0-medium"))
def largest(
    model: Model = None,
    contender: Contender = None,
    dtype: Dtype = "float32",
    most_atoms: Annotated[int | None, options.option("No more atoms than that; a CPU needs it.")] = None,
    device: options.Device = None,
    fresh: Fresh = False,
    results: options.Results = None,
) -> None:
    """Double a diamond crystal until energies, forces and stress of a step do not fit, by every path.

    One model and one path after the other. The record is results/models/DEVICE.json.
    """
    from autotune.bench.whole_models import LargestRequest, largest_crystals, table_lines

    _require_dtype(dtype)
    given = tuple(model or ()), tuple(contender or ())
    request = LargestRequest(*given, options.resolve_device(device), dtype, fresh, most_atoms)
    folder = options.results_folder(results)
    rows = largest_crystals(request, folder, _say)
    about = "largest diamond crystal that fits: energies, forces and stress of one step"
    _conclude(about, table_lines(rows), folder, request.device)


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
