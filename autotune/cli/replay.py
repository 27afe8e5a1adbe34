"""``equitune record``, ``replay`` and ``explain-defaults``: what a whole search space teaches, without a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.options import Group
from autotune.paths import typed


class ReplayGroup(Group):
    usual, argument = "records", "RECORD"
    old = {"--defaults": "defaults"}


app = typer.Typer(
    cls=ReplayGroup,
    help="Replay stored times without a device: samplers on a RECORD, as `equitune replay records`, or defaults.",
    subcommand_metavar="RECORD... | COMMAND [ARGS]...",
)


def record(config: options.Config, device: options.Device = None, results: options.Results = None) -> None:
    """Time every schedule of the space in the config's table \\[record.BACKEND], for replays."""
    from autotune.replay.samplers import record as run_record
    from autotune.tune.settings import Progress
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    device = options.resolve_device(device)
    loaded = load_config(config, device_facts(device).backend)
    with options.Interrupts() as interrupts, Progress() as progress:
        for path in run_record(loaded, device, options.results_folder(results), progress):
            print(f"record: {path}")
    if interrupts.seen:
        raise typer.Exit(options.INTERRUPTED)


def explain_defaults(
    device: Annotated[
        str | None, typer.Argument(metavar="DEVICE", help="Such as nvidia-h200. Default: all that have a database.")
    ] = None,
    near: Annotated[float, typer.Option(help="How near to the best counts: 0.05 is 5%.")] = 0.05,
    most: Annotated[int, typer.Option(help="Print so many schedules of each kernel.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with all of them.")] = False,
    results: options.Results = None,
) -> None:
    """Print, from all trials, the fewest schedules that are near the best everywhere, as rules."""
    from autotune.database.store import device_files, read_table
    from autotune.errors import ConfigError
    from autotune.replay.explained import as_data, explain, lines_of
    from autotune.replay.open_formats import studies_of

    options.positive("--most", most)
    folder = options.results_folder(results)
    slugs = [file.stem for file in device_files(folder)]
    chosen = [slug for slug in slugs if device in (None, slug)]
    tables = {slug: read_table(folder / f"{slug}.json") for slug in chosen}
    studies = {slug: studies_of(folder, slug, table.device)[0] for slug, table in tables.items()}
    if not any(studies.values()):
        known = f"; with a database there: {', '.join(slugs)}" if slugs else ""
        raise ConfigError(
            f"{folder} has no trials of {device or 'any device'}{known}. A wheel does not carry the shipped trials: "
            "take a checkout of Equitune's repository, and name its folder: --results CHECKOUT/results"
        )
    data = []
    for slug, table in tables.items():
        found = explain(studies[slug], near)
        data += [{"device": slug, **as_data(rules)} for rules in found]
        if not as_json:
            print(f"{table.device.get('name', slug)}:")
            print(*(line for rules in found for line in lines_of(rules, most)), sep="\n")
    if as_json:
        print(json.dumps(data, indent=1))


@app.command(
    epilog=options.examples("equitune replay results/record/*.jsonl.gz --sampler tpe --seeds 5"),
)
def records(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RECORD...", help="Files of results/record, packed (DEVICE.jsonl.gz) or not."),
    ],
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            help="tpe, climb, gp, random, default, or module:Class of an Optuna sampler. Repeat it for several. "
            "Default: all but classes.",
            rich_help_panel=options.SEARCH,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each sampler. Default: 20, for gp 5.", rich_help_panel=options.SEARCH)
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials of each run.", rich_help_panel=options.SEARCH)] = 150,
    ahead: Annotated[
        int | None,
        typer.Option(help="Proposals in flight. Default: as on the recording machine.", rich_help_panel=options.SEARCH),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune", help="Skip kernels that spill too many registers.", rich_help_panel=options.SEARCH
        ),
    ] = True,
    transfer: Annotated[
        bool,
        typer.Option(
            "--transfer/--no-transfer", help="Start from winners of related kernels.", rich_help_panel=options.SEARCH
        ),
    ] = True,
    results: options.Results = None,
) -> None:
    """Compare samplers on recorded times: trials until a schedule near the best is found."""
    from autotune.database.trials import studies_in
    from autotune.replay.samplers import SEEDS, load_record, replay_table, write_replay
    from autotune.replay.samplers import replay as run_replay
    from autotune.search.starting_points import known_entries

    for option, number in (("--seeds", seeds), ("--trials", trials), ("--ahead", ahead)):
        options.positive(option, number)
    folder = options.results_folder(results)
    for file in (study for path in files for study in studies_in(path)):
        recorded = load_record(file)
        related = recorded.transfers(known_entries(recorded.space.spec.facts, folder)) if transfer else {}
        how: dict[str, Any] = {"seeds": seeds, "ahead": ahead, "prune": prune, "transfers": related}
        data = run_replay(recorded, sampler or SEEDS, trials, **how)
        options.print_rich(replay_table(data))
        print(f"replay: {write_replay(folder, data)}")


@app.command(
    epilog=options.examples(
        "equitune replay defaults results/trials/nvidia-h200.jsonl.gz",
        "equitune replay defaults results/trials/nvidia-h200.jsonl.gz --measure 2m",
    )
)
def defaults(
    files: Annotated[
        list[Path], typer.Argument(metavar="TRIALS...", help="A device's trials: results/trials/DEVICE.jsonl.gz.")
    ],
    measure: Annotated[
        str | None,
        typer.Option(
            help="On the archive's GPU: measure choices that are only estimates, the most expensive first, for so "
            "long: 60s, 10m.",
            rich_help_panel=options.MEASURING,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --measure: cuda or cuda:N.", rich_help_panel=options.MEASURING)
    ] = None,
    results: options.Results = None,
) -> None:
    """Fit the model of untuned schedules: what they cost on problems that are held out in turn.

    The trials of results/drawn count too; the fitted model is results/predicted/DEVICE.json. What --measure finds is
    results/replay/measured-DEVICE.json, and counts in every later replay.
    """
    from autotune.errors import ConfigError

    seconds, folder = options.budget_seconds(measure, "--measure"), options.results_folder(results)
    if seconds is not None:
        _measure_choices(files, folder, options.resolve_device(device), seconds)
        return
    if device is not None:
        raise ConfigError(f"--device {device}: a replay needs no device; expected it beside --measure")
    from autotune.replay.untuned import costs_table, measured_line, replay_defaults

    for archive in files:
        record, *written = replay_defaults(archive, folder, _say)
        options.print_rich(costs_table(record))
        _say(measured_line(record["choices"][record["chosen"]], record["compared"]))
        for path in written:
            _say(str(path))


def _measure_choices(files: list[Path], results: Path, device: str, seconds: float) -> None:
    """Exit code 1 if a comparison failed."""
    from autotune.replay.measured import measure_choices
    from autotune.replay.untuned import measured_line, summary

    failed = 0
    for archive in files:
        choices, lost = measure_choices(archive, results, device, seconds, _say)
        costs = [choice.cost for choice in choices]
        _say(measured_line(summary(costs), sum(cost.compared for cost in costs)))
        options.print_next(typed(f"replay defaults {archive}"))
        failed += lost
    if failed:
        _say(f"{failed} comparisons failed, see above")
        raise typer.Exit(1)


def _say(text: str) -> None:
    print(f"replay: {text}", flush=True)
