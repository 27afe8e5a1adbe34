"""``equitune tune``: from a config, from a model, or from the misses of earlier models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from autotune.cli.options import (
    INTERRUPTED,
    OUTPUT,
    SEARCH,
    SHARING,
    Budget,
    ConfigOrNone,
    Device,
    Interrupts,
    Reports,
    Results,
    Trials,
    budget_seconds,
    devices_given,
    examples,
    positive,
    print_next,
    results_folder,
    sampler_name,
    write_pages,
)

if TYPE_CHECKING:
    from autotune.tune.model import ModelTuning
    from autotune.workload.config import TuneConfig

TUNE_EXAMPLES = examples(
    "equitune tune quick",
    "equitune tune configs/mace-mp-medium.toml --budget 10m --device cuda:0",
    "equitune tune --model my.model --structure box.xyz",
    "equitune tune --misses --budget 1h",
    "equitune tune configs/h200.toml --devices all --no-peers",
    "equitune tune own.toml --storage postgresql+psycopg://me@host/equitune",
)


def tune(
    config: ConfigOrNone = None,
    model: Model = None,
    structure: Structure = None,
    training: Training = False,
    dtype: Dtype = None,
    misses: Misses = False,
    device: Device = None,
    budget: Budget = None,
    trials: Trials = None,
    sampler: Annotated[
        str | None, typer.Option(help="auto, tpe, climb, gp, random or brute.", rich_help_panel=SEARCH)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=SEARCH)] = 0,
    patience: Annotated[
        int | None,
        typer.Option(
            help="End a search after this many trials without a 1% gain. Default on a GPU: 120.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="Run one tuner on each device: all, 0,1 or cpu,cpu (to try it).", rich_help_panel=SHARING),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared", help="Share studies with other tuners of this results folder.", rich_help_panel=SHARING
        ),
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Optuna storage URL. All tuners that name it share their studies. If the database server restarts, "
            "tuners wait up to two minutes.",
            rich_help_panel=SHARING,
        ),
    ] = None,
    peers: Annotated[
        bool | None,
        typer.Option(
            "--peers/--no-peers",
            help="Also time the peers (e3nn, ...). Default: with a config, where a third of the budget suffices.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    results: Results = None,
    reports: Reports = None,
) -> None:
    """Search for the fastest schedules on this device, verify and store them, and write the report.

    What to tune comes from a config, from a model that is run once, or from what earlier models missed.
    """
    from autotune.workload.toml_tables import check_seed, config_path

    of_model = {"--structure": structure, "--training": training, "--dtype": dtype}
    check_choice(config, model, of_model, misses, {"--devices": devices, "--shared": shared})
    seconds, sampler = budget_seconds(budget), sampler_name(sampler)
    positive("--trials", trials)
    positive("--patience", patience)
    check_seed(seed)
    if config is not None:
        config_path(config)
    # Mistakes until here are answered without torch.
    from autotune.cli.show import show_command
    from autotune.report import summary_table
    from kernelgen.device import device_facts

    chosen = devices_given(device, devices)
    folder, slug = results_folder(results), device_facts(chosen[0]).slug
    if config is not None:
        options = (seconds, trials, sampler, storage, seed, folder, peers, patience)
        loaded, interrupted = _tune_config(config, chosen, options, together=shared or devices is not None)
        print(summary_table(folder, slug))
        if write_pages(folder, reports, slug):
            print_next(f"open the report in a browser, or type {show_command(loaded.workloads[0], device, folder)}")
    else:
        search: dict[str, Any] = {"trials": trials, "sampler": sampler, "storage": storage, "seed": seed}
        search |= {"patience": patience, "with_peers": bool(peers)}
        if model is not None:
            run = ModelRun(model, structure, dtype, training)
            found, interrupted = tune_from_model(run, chosen[0], seconds, folder, search)
        else:
            found, interrupted = tune_from_misses(chosen[0], seconds, folder, search)
        if found.after != found.before:
            write_pages(folder, reports, slug)
        if found.left:
            print_next("run the same command again: it goes on where this one stopped")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _tune_config(config: str, devices: list[str], options: Any, together: bool) -> tuple[TuneConfig, bool]:
    """The config, and whether the user interrupted the run. ``options``: of ``run.tune`` after the device."""
    from autotune.tune.run import tune as run_tune
    from autotune.tune.run import tune_together
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    loaded = load_config(config, device_facts(devices[0]).backend)
    with Interrupts() as interrupts:
        if together:
            tune_together(loaded, devices, *options)
        else:
            run_tune(loaded, devices[0], *options)
    return loaded, interrupts.seen


# ``equitune tune --model`` and ``--misses``, and ``equitune show --misses``.

FROM_MODEL = "A model instead of a config"

Model = Annotated[
    str | None,
    typer.Option(
        help="A file of MACE, NequIP or SevenNet, the name of a published model, or module:function, which returns a "
        "model, or a model and its inputs.",
        rich_help_panel=FROM_MODEL,
    ),
]
Structure = Annotated[
    str | None,
    typer.Option(
        help="The atoms on which it runs: a file that ase reads, or a name such as mof.", rich_help_panel=FROM_MODEL
    ),
]
Training = Annotated[bool, typer.Option("--training", help="Also tune a training step.", rich_help_panel=FROM_MODEL)]
Dtype = Annotated[
    str | None,
    typer.Option(help="Run the model in float32 or float64. Default: as in the file.", rich_help_panel=FROM_MODEL),
]
Misses = Annotated[
    bool,
    typer.Option("--misses", help="Tune what running models asked for and did not find.", rich_help_panel=FROM_MODEL),
]


class ModelRun(NamedTuple):
    """What ``--model`` and its options say."""

    model: str
    structure: str | None
    dtype: str | None
    training: bool


def check_choice(
    config: str | None,
    model: str | None,
    only_with_model: Mapping[str, Any],
    misses: bool,
    only_with_config: Mapping[str, Any],
) -> None:
    """ConfigError unless exactly one thing says what to tune, and all options fit it; they are given by name."""
    from autotune.errors import ConfigError

    chosen = [text for text, given in (("CONFIG", config), ("--model", model), ("--misses", misses)) if given]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "nothing"
        raise ConfigError(f"{found} says what to tune; expected one of CONFIG, --model MODEL and --misses")
    for options, needed in ((only_with_model, "--model"), (only_with_config, "CONFIG")):
        wrong = [name for name, value in options.items() if value]
        if wrong and chosen != [needed]:
            raise ConfigError(f"{wrong[0]} goes with {needed}, not with {chosen[0]}; leave it out")


def tune_from_model(
    run: ModelRun, device: str, seconds: float | None, results: Path, search: Mapping[str, Any]
) -> tuple[ModelTuning, bool]:
    """The printed result, and whether the user interrupted the run. search: options of ``run.tune``."""
    import time

    begin = time.monotonic()
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_passes
    from autotune.tune.model_passes import open_named

    opened = open_named(run.model, run.structure, device, run.dtype, run.training)
    if opened.replaced:
        print(opened.replaced, flush=True)
    left = (seconds or DEFAULT_BUDGET_S) - (time.monotonic() - begin)
    with Interrupts() as interrupts:
        found = tune_passes(
            *(opened.model, opened.passes, left, search, results),
            name=opened.name,
            graph=opened.graph,
            stopped=lambda: interrupts.seen,
            on_found=_say_what_is_left,
        )
    print(found, flush=True)
    return found, interrupts.seen


def tune_from_misses(
    device: str, seconds: float | None, results: Path, search: Mapping[str, Any]
) -> tuple[ModelTuning, bool]:
    """As :func:`tune_from_model`."""
    from autotune.tune.model import DEFAULT_BUDGET_S, tune_misses

    with Interrupts() as interrupts:
        found = tune_misses(device, seconds or DEFAULT_BUDGET_S, search, results, on_found=_say_what_is_left)
    print(found, flush=True)
    return found, interrupts.seen


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
    print_next("equitune tune --misses")


def _say_what_is_left(found: ModelTuning) -> None:
    print(f"{found.name}: {len(found.before)} kernels, {found.left} not tuned on {found.device}", flush=True)
