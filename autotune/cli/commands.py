"""The ``equitune`` command: arguments enter, the other modules do the work, text and an exit code leave.

Exit codes: 0 done, 2 a mistake that can be named (one line on standard error), 130 interrupted. A traceback means a
bug. Everything heavy is imported inside the commands, so that ``equitune --help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from autotune.cli import database as cli_db
from autotune.cli.options import (
    Interrupts,
    devices_given,
    duration,
    peers_named,
    positive,
    print_rich,
    resolve_device,
    results_folder,
    sampler_name,
    write_comparison_page,
    write_pages,
)

INTERRUPTED = 130

app = typer.Typer(
    name="equitune",
    help="Generated and autotuned kernels for O(3)-equivariant tensor products.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of one in configs/.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; by default the GPU if there is one.")]
Results = Annotated[Path | None, typer.Option(help="Folder of the tuned database and the raw trials.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Compare with the peers, too.")]
Reports = Annotated[Path | None, typer.Option(help="Folder of the HTML pages.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; deliberate errors become one line on standard error and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        code = app(args=arguments, prog_name="equitune", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        from kernelgen.errors import EquituneError

        if isinstance(error, OSError) and error.filename is not None:
            _fail(f"{error.filename}: {error.strerror}")
        if not isinstance(error, EquituneError):
            raise
        _fail(str(error))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    """One line, whatever the message was: a compiler's log is in there with its lines joined."""
    line = " ".join(message.split())
    print(f"equitune: error: {line[:2000]}", file=sys.stderr)
    sys.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"equitune: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        from kernelgen.version import __version__

        print(f"equitune {__version__}")
        raise typer.Exit


app.add_typer(cli_db.app, name="db")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="The same as a JSON list.")] = False,
) -> None:
    """What this machine offers: device, compilers, versions, cache, databases, usable peers."""
    from autotune.cli.doctor import as_data, as_table, examine

    findings = examine()
    if as_json:
        print(json.dumps(as_data(findings), indent=1))
    else:
        print_rich(as_table(findings))


@app.command()
def tune(
    config: Config,
    device: Device = None,
    devices: Annotated[
        str | None, typer.Option(help="A tuner on each, sharing every study: all, 0,1 or cpu,cpu (for trying out).")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Time for the whole config: 90s, 10m, 1h30m.")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials a search, those of earlier runs included.")] = None,
    sampler: Annotated[str | None, typer.Option(help="auto, tpe, climb, gp, random or brute.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage URL: share the studies with every tuner that names it.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Share the studies with other tuners of this results folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    patience: Annotated[
        int | None, typer.Option(help="End a search after so many trials without a gain of 1%; 120 on a GPU.")
    ] = None,
    peers: Peers = True,
    results: Results = None,
    reports: Reports = None,
) -> None:
    """Search schedules for this device, prove the winners, store them and write the report."""
    from autotune.report import summary_table
    from autotune.tune.multi_device import tune_together
    from autotune.tune.run import tune as run_tune
    from autotune.workload.config import check_seed, load_config
    from kernelgen.device import device_facts

    seconds, sampler = duration(budget), sampler_name(sampler)
    positive("--trials", trials)
    positive("--patience", patience)
    check_seed(seed)
    chosen = devices_given(device, devices)
    facts = device_facts(chosen[0])
    loaded = load_config(config, facts.backend)
    folder = results_folder(results)
    options = (seconds, trials, sampler, storage, seed, folder, peers, patience)
    with Interrupts() as interrupts:
        if devices is None and not shared:
            run_tune(loaded, chosen[0], *options)
        else:
            tune_together(loaded, chosen, *options)
    print(summary_table(folder, facts.slug))
    write_pages(folder, reports, facts.slug)
    if interrupts.seen:
        raise typer.Exit(INTERRUPTED)


@app.command()
def bench(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG]", help="A TOML file, or the name of one in configs/.")
    ] = None,
    suite: Annotated[bool, typer.Option("--suite", help="All rows of configs/suite.toml.")] = False,
    device: Device = None,
    devices: Annotated[
        str | None, typer.Option(help="Share the problems out: all, 0,1 or cpu,cpu (for trying out).")
    ] = None,
    peers: Annotated[str, typer.Option(help="all, none, or names: e3nn,cuequivariance.")] = "all",
    no_peers: Annotated[bool, typer.Option("--no-peers", help="The same as --peers none.")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Sampling time a contender and pass; 2, with --suite 0.3.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is already measured.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say every step, with the time.")] = False,
    results: Results = None,
    reports: Reports = None,
) -> None:
    """Compare default, tuned, e3nn, cuEquivariance and OpenEquivariance in one run; nothing is searched.

    Goes on where an earlier run ended: rows of the present generator, schedules and software are kept.
    """
    from rich.console import Console

    from autotune.bench.run import bench as run_bench
    from autotune.errors import ConfigError
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    if (config is None) != suite:
        raise ConfigError(f"CONFIG is {config!r} {'with' if suite else 'without'} --suite; expected one of the two")
    if seconds is not None and not seconds >= 0:
        raise ConfigError(f"--seconds is {seconds}; expected a number that is not negative")
    chosen = devices_given(device, devices)
    facts = device_facts(chosen[0])
    folder = results_folder(results)
    run_bench(
        load_config(config or "suite", facts.backend),
        chosen[0],
        folder,
        devices=chosen,
        peers=() if no_peers else peers_named(peers),
        seconds_each=(0.3 if suite else 2.0) if seconds is None else seconds,
        fresh=fresh,
        console=Console(),
        verbose=verbose,
    )
    write_pages(folder, reports, facts.slug)


@app.command()
def record(config: Config, device: Device = None, results: Results = None) -> None:
    """Measure every schedule of the config's [record.BACKEND] space, to replay samplers against later."""
    from autotune.replay.record import record as run_record
    from autotune.tune.progress import Progress
    from autotune.workload.config import load_config
    from kernelgen.device import device_facts

    device = resolve_device(device)
    loaded = load_config(config, device_facts(device).backend)
    with Interrupts() as interrupts, Progress() as progress:
        for path in run_record(loaded, device, results_folder(results), progress):
            print(f"record: {path}")
    if interrupts.seen:
        raise typer.Exit(INTERRUPTED)


@app.command()
def replay(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="RECORD...", help="Files of results/record, packed (DEVICE.jsonl.gz) or not."),
    ],
    sampler: Annotated[
        list[str] | None, typer.Option(help="tpe, climb, gp, random or default; by default all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs a sampler; by default 20, and 5 of gp.")] = None,
    trials: Annotated[int, typer.Option(help="Trials a run.")] = 150,
    ahead: Annotated[
        int | None, typer.Option(help="Proposals under way; by default as in a search on the recording machine.")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Skip kernels that spill too much.")] = True,
    transfer: Annotated[
        bool, typer.Option("--transfer/--no-transfer", help="Search from winners of related kernels, too.")
    ] = True,
    results: Results = None,
) -> None:
    """Run samplers against records, without a device: trials until near the best schedule, side by side."""
    from autotune.database.trial_archive import studies_in
    from autotune.replay.recorded import load_record
    from autotune.replay.run import SEEDS, replay_table, write_replay
    from autotune.replay.run import replay as run_replay
    from autotune.search.starting_points import known_entries

    for option, number in (("--seeds", seeds), ("--trials", trials), ("--ahead", ahead)):
        positive(option, number)
    folder = results_folder(results)
    for file in (study for path in files for study in studies_in(path)):
        recorded = load_record(file)
        related = recorded.transfers(known_entries(recorded.space.spec.facts, folder)) if transfer else {}
        options: dict[str, Any] = {"seeds": seeds, "ahead": ahead, "prune": prune, "transfers": related}
        data = run_replay(recorded, sampler or SEEDS, trials, **options)
        print_rich(replay_table(data))
        print(f"replay: {write_replay(folder, data)}")


@app.command()
def report(
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Two bench records (or results folders): one page on what changed."),
    ] = None,
    results: Results = None,
    reports: Reports = None,
) -> None:
    """Rebuild the HTML pages from the results alone, or compare two records of the bench."""
    if compare is None:
        write_pages(results_folder(results), reports, None)
    else:
        write_comparison_page(*compare, results_folder(results), reports)


@app.command()
def show(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A name of configs/problems.toml, or a key.")],
    device: Device = None,
    operation: Annotated[Literal["conv", "plain"], typer.Option(help="Of a product: convolution, or plain.")] = "conv",
    dtype: Annotated[Literal["float32", "float64"], typer.Option()] = "float32",
    layout: Annotated[Literal["mul_ir", "ir_mul"], typer.Option()] = "mul_ir",
    graph_class: Annotated[str | None, typer.Option(help="Such as conv-e14-d5; by default any.")] = None,
) -> None:
    """What the runtime would load here for a problem, and why."""
    from autotune.cli.show import show as show_text

    device = resolve_device(device)
    print(show_text(problem, operation=operation, dtype=dtype, layout=layout, device=device, graph_class=graph_class))


if __name__ == "__main__":
    main()
