"""``equitune tune``: from a config, from a model, or from the misses of earlier models."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.options import Group
from autotune.errors import ConfigError
from autotune.paths import typed

if TYPE_CHECKING:
    from autotune.tune.model import ModelTuning


class TuneGroup(Group):
    usual = "config"
    old = {"--model": "model", "--misses": "misses"}


app = typer.Typer(
    cls=TuneGroup,
    help="Search for the fastest schedules on this device, verify and store them, and write the report. With a CONFIG: "
    "for its workloads, as `equitune tune config`.",
    subcommand_metavar="CONFIG | COMMAND [ARGS]...",
)

Sampler = Annotated[str | None, options.search("auto, tpe, climb, gp, random, brute, or module:Class.")]
Seed = Annotated[int, options.search("Random seed.")]
Patience = Annotated[
    int | None, options.search("End a search after this many trials without a 1% gain. Default on a GPU: 120.")
]
Objective = Annotated[
    str,
    options.search(
        "What to minimise: time, energy (joules a call) or memory (bytes a call); weighted, as time=1,energy=0.5; "
        "or all that no other beats in each: pareto:time,memory. Energy and memory need a GPU."
    ),
]
Counters = Annotated[
    str,
    options.output(
        "Count what the best few do on a GPU (DRAM, tensor cores, occupancy): auto, if ncu is there; or none."
    ),
]
Shared = Annotated[bool, options.sharing("Share studies with other tuners of this results folder.", "--shared")]
Storage = Annotated[
    str | None,
    options.sharing(
        "Optuna storage URL. All tuners that name it share their studies. If the database server restarts, "
        "tuners wait up to two minutes."
    ),
]


@app.command(
    "config",
    epilog=options.examples(
        "equitune tune quick",
        "equitune tune configs/mace-mp-medium.toml --budget 10m --device cuda:0",
        "equitune tune configs/h200.toml --devices all --no-peers",
        "equitune tune own.toml --objective time=1,energy=0.5",
        "equitune tune own.toml --storage postgresql+psycopg://me@host/equitune",
    ),
)
def tune_config(
    config: options.Config,
    device: options.Device = None,
    budget: options.Budget = None,
    trials: options.Trials = None,
    sampler: Sampler = None,
    seed: Seed = 0,
    patience: Patience = None,
    objective: Objective = "time",
    counters: Counters = "auto",
    devices: Annotated[
        str | None, options.sharing("Run one tuner on each device: all, 0,1 or cpu,cpu (to try it).")
    ] = None,
    shared: Shared = False,
    storage: Storage = None,
    peers: options.Peers = None,
    no_peers: options.NoPeers = False,
    watch: options.Watch = False,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Tune the workloads of a config."""
    begin = time.monotonic()
    from autotune.measure.worker import launch_server
    from autotune.workload.toml_tables import config_path

    seconds = checked(budget, trials, sampler, seed, patience, objective, counters)
    config_path(config)
    if watch and (shared or devices is not None):
        raise ConfigError("--watch shows one tuner; leave out --shared and --devices, or --watch")
    # Mistakes until here are answered without torch.
    launch_server()
    from autotune.cli.show import show_command
    from autotune.report import summary_table
    from autotune.tune.run import tune, tune_together
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    chosen, folder = options.devices_given(device, devices), options.results_folder(results)
    facts = device_facts(chosen[0])
    loaded = load_config(config, facts.backend)
    if seconds is None and loaded.budget_s is not None:
        loaded = dataclasses.replace(loaded, budget_s=options.what_is_left(loaded.budget_s, begin))
    seconds = None if seconds is None else options.what_is_left(seconds, begin)
    with_peers = options.peers_asked(peers, no_peers, None)
    search: dict[str, Any] = {"budget": seconds, "trials": trials, "sampler": sampler, "storage": storage, "seed": seed}
    search |= {"results_dir": folder, "with_peers": with_peers, "patience": patience, "objective": objective}
    search["counters"] = counters
    with ExitStack() as stack, options.Interrupts() as interrupts:
        if shared or devices is not None:
            tune_together(loaded, chosen, **search)
        elif watch:
            live = stack.enter_context(options.watched(folder, reports, facts.slug))
            tune(loaded, chosen[0], **search, watch=live.show)
        else:
            tune(loaded, chosen[0], **search)
    print(summary_table(folder, facts.slug))
    if options.write_pages(folder, reports, facts.slug):
        options.print_next(f"open the report in a browser, or type {show_command(loaded.workloads[0], device, folder)}")
    if interrupts.seen:
        raise typer.Exit(options.INTERRUPTED)


@app.command(epilog=options.examples("equitune tune model my.model --structure box.xyz"))
def model(
    name: options.ModelName,
    structure: options.Structure = None,
    training: Annotated[bool, options.option("Also tune a training step.", "--training")] = False,
    dtype: options.ModelDtype = None,
    device: options.Device = None,
    budget: options.Budget = None,
    trials: options.Trials = None,
    sampler: Sampler = None,
    seed: Seed = 0,
    patience: Patience = None,
    objective: Objective = "time",
    counters: Counters = "auto",
    shared: Shared = False,
    storage: Storage = None,
    peers: options.Peers = None,
    no_peers: options.NoPeers = False,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Tune what a model runs on a structure, and print its times before and after."""
    begin = time.monotonic()
    seconds = checked(budget, trials, sampler, seed, patience, objective, counters)
    search: dict[str, Any] = {"trials": trials, "sampler": sampler, "storage": storage, "seed": seed}
    search |= {"patience": patience, "tuners": 1 if shared else None, "objective": objective}
    search |= {"counters": counters}
    search |= {"with_peers": options.peers_asked(peers, no_peers, False)}
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_passes
    from autotune.tune.model_passes import open_named

    on, folder = _device_for(objective, device), options.results_folder(results)
    opened = open_named(name, structure, on, dtype, training)
    if opened.replaced:
        print(opened.replaced, flush=True)
    if opened.dtype:
        other = "float32" if opened.dtype == "float64" else "float64"
        print(
            f"in {opened.dtype}, {'as given' if dtype else f'as in the file; for another: --dtype {other}'}", flush=True
        )
    left = options.what_is_left(seconds or DEFAULT_BUDGET_S, begin)
    of_model: dict[str, Any] = {"name": opened.name, "graph": opened.graph, "on_found": _say_what_is_left}

    def tuned(stopped: Callable[[], bool]) -> ModelTuning:
        return tune_passes(opened.model, opened.passes, left, search, folder, stopped=stopped, **of_model)

    _conclude(tuned, on, folder, reports)


@app.command(epilog=options.examples("equitune tune misses --budget 1h"))
def misses(
    device: options.Device = None,
    budget: options.Budget = None,
    trials: options.Trials = None,
    sampler: Sampler = None,
    seed: Seed = 0,
    patience: Patience = None,
    objective: Objective = "time",
    counters: Counters = "auto",
    shared: Shared = False,
    storage: Storage = None,
    peers: options.Peers = None,
    no_peers: options.NoPeers = False,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Tune what running models asked for and did not find."""
    begin = time.monotonic()
    seconds = checked(budget, trials, sampler, seed, patience, objective, counters)
    search: dict[str, Any] = {"trials": trials, "sampler": sampler, "storage": storage, "seed": seed}
    search |= {"patience": patience, "tuners": 1 if shared else None, "objective": objective}
    search |= {"counters": counters}
    search |= {"with_peers": options.peers_asked(peers, no_peers, False)}
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_misses

    on, folder = _device_for(objective, device), options.results_folder(results)
    limit_s = options.what_is_left(seconds or DEFAULT_BUDGET_S, begin)
    _conclude(lambda _: tune_misses(on, limit_s, search, folder, on_found=_say_what_is_left), on, folder, reports)


def checked(
    budget: str | None,
    trials: int | None,
    sampler: str | None,
    seed: int,
    patience: int | None,
    objective: str,
    counters: str,
) -> float | None:
    """The budget in seconds; a mistake in an option of a search is answered without torch."""
    from autotune.measure.counters import counts_asked
    from autotune.workload import objective as objectives
    from autotune.workload.toml_tables import check_sampler, check_seed

    objectives.Objective.parse(objective)
    counts_asked(counters)
    seconds = options.budget_seconds(budget)
    if sampler is not None:
        check_sampler(sampler)
    options.positive("--trials", trials)
    options.positive("--patience", patience)
    check_seed(seed)
    return seconds


def _device_for(objective: str, device: str | None) -> str:
    """The device, refused at once if it does not count what the objective asks for."""
    from autotune.measure.timing import require_figures
    from autotune.workload import objective as objectives

    on = options.resolve_device(device)
    require_figures(objectives.Objective.parse(objective), on)
    return on


def _conclude(
    tuned: Callable[[Callable[[], bool]], ModelTuning], device: str, results: Path, reports: Path | None
) -> None:
    """Tune until done or interrupted, which it can ask for, and print and write what was found."""
    from kernelgen.device import device_facts

    with options.Interrupts() as interrupts:
        found = tuned(lambda: interrupts.seen)
    print(found, flush=True)
    if found.after != found.before:
        options.write_pages(results, reports, device_facts(device).slug)
    if found.left:
        options.print_next("run the same command again: it goes on where this one stopped")
    if interrupts.seen:
        raise typer.Exit(options.INTERRUPTED)


def show_misses(device: str) -> None:
    """Print what running models missed on a device."""
    from autotune.database.misses import misses_path
    from autotune.tune.model import ModelTuning, missed
    from kernelgen.device import device_facts

    facts = device_facts(device)
    needs = missed(facts)
    if not needs:
        print(f"no model missed a tuned kernel on {facts.name} ({misses_path(facts.slug)})")
        return
    print(ModelTuning("missed by models", facts.name, needs, needs, {}))
    options.print_next(typed("tune misses"))


def _say_what_is_left(found: ModelTuning) -> None:
    from autotune.tune.model import opaque_names

    new = sum(not need.is_tuned for need in found.before)
    more = f", {found.left - new} to go on with" if found.left > new else ""
    print(f"{found.name}: {len(found.before)} kernels, {new} not tuned{more} on {found.device}", flush=True)
    for line in opaque_names(need for need in found.before if need.why_left):
        print(line, flush=True)
