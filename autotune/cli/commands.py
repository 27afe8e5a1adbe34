"""The ``equitune`` command: reads arguments, calls the other modules, prints text and returns an exit code.

Exit codes: 0 done, 1 a certificate that failed or was refused, 2 a deliberate error (one line on standard error),
130 interrupted. A traceback means a bug. Slow imports are inside the commands, so that ``equitune --help`` answers at
once.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from autotune.cli import bench as cli_bench
from autotune.cli import database as cli_db
from autotune.cli import options
from autotune.cli import pack as cli_pack
from autotune.cli import tune as cli_tune
from autotune.cli.tune import show_misses
from autotune.errors import ConfigError
from autotune.paths import reports_dir, typed
from kernelgen.errors import EquituneError
from kernelgen.files import with_fit_texts
from kernelgen.version import __version__

# The exit code of a command that ran and found something wrong.
FAILED = 1
ORDER = ("doctor", "tune", "bench", "certify", "record", "replay", "explain-defaults", "pack", "report", "show", "db")


class Root(TyperGroup):
    """All commands, and groups of them, in the order of the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(
    name="equitune",
    cls=Root,
    help="Generate and autotune kernels for O(3)-equivariant tensor products.",
    epilog=options.examples("equitune doctor", "equitune tune quick", "equitune show mace-mp-medium"),
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; deliberate errors become one line on standard error and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        code = app(args=arguments, prog_name="equitune", standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        code = options.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            _fail(f"{error.filename}: {error.strerror}")
        if not isinstance(error, EquituneError):
            raise
        _fail(str(error))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    """Print the message as one line (a compiler's log is joined) and exit."""
    line = with_fit_texts(" ".join(message.split()))
    print(f"equitune: error: {line[:2000]}", file=sys.stderr)
    sys.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    noise: tuple[str, ...] = ()
    if sys.modules.get("torch"):  # whose warnings these are; it may be broken
        from autotune.models.package import NOISE as noise

    if not str(message).startswith(noise):
        print(f"equitune: warning: {with_fit_texts(' '.join(str(message).split()))}", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"equitune {__version__}")
        raise typer.Exit


app.add_typer(cli_db.app, name="db")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, options.option("Print the version.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(as_json: options.Json = False) -> None:
    """Check this machine: device, compilers, versions, cache, databases, usable peers."""
    from autotune.cli.doctor import Finding, as_data, as_lines, as_table, examine, next_step

    if as_json:
        print(json.dumps(as_data(examine()), indent=1))
        return
    findings: list[Finding] = []
    for _, section in itertools.groupby(examine(), key=lambda finding: finding.section):
        rows = tuple(section)
        if sys.stdout.isatty():
            options.print_rich(as_table(rows))
        else:  # whole paths, for another program or an issue
            print("\n".join(as_lines(rows)))
        findings += rows
    options.print_next(next_step(findings))


app.add_typer(cli_tune.app, name="tune")
app.add_typer(cli_bench.app, name="bench")

CertificateFolder = Annotated[
    Path | None,
    options.output(
        "The record goes to certificates/ in this folder. Default: results/ of a checkout, else "
        "$EQUITUNE_DATABASE or the platform's data folder."
    ),
]
CertificatePages = Annotated[
    Path | None,
    options.output("Folder of the page. Default: reports/ of a checkout, or reports/ in the folder of the results."),
]


@app.command(
    epilog=options.examples(
        "equitune certify checkpoint.pth",
        "equitune certify my.model --structure box.xyz --paths equitune,captured --device cuda",
        "equitune certify all --quick --device cuda",
    )
)
def certify(
    model: Annotated[
        str,
        options.argument(
            "MODEL",
            "A file of MACE, NequIP or SevenNet, the name of a published model, module:function, which returns a "
            "model; or all: the published models of the packages that are installed, and the files in SevenNet's.",
        ),
    ],
    structure: Annotated[
        list[str] | None,
        options.option("A file that ase reads, or a name such as mof; may be repeated. Default: drawn structures."),
    ] = None,
    paths: Annotated[
        str | None,
        options.option(
            "Such as equitune,captured,cuequivariance,openequivariance. Exit code 1 if one of them is refused. "
            "Default: all of the package."
        ),
    ] = None,
    dtype: Annotated[str, options.option("float64, float32, or both with a comma.")] = "float64,float32",
    device: options.Device = None,
    quick: Annotated[bool, options.option("3 runs and 6 steps in place of 10 and 20.", "--quick")] = False,
    thorough: Annotated[bool, options.option("500 steps, 8 directions in place of 2.", "--thorough")] = False,
    seed: Annotated[int, options.option("Of the structures, rotations and displacements.")] = 0,
    budget: Annotated[
        str | None,
        options.option(
            "Time limit of the whole run, with units: 90s, 10m. Paths that it ends before are cut, not passed."
        ),
    ] = None,
    results: CertificateFolder = None,
    reports: CertificatePages = None,
) -> None:
    """Compare each path of a model with stock in float64, on drawn structures or yours; exit code 1 if one differs."""
    begin = time.monotonic()
    from autotune.workload.toml_tables import check_seed

    seconds = options.budget_seconds(budget)
    if quick and thorough:
        raise ConfigError("--quick and --thorough are both given; expected one of them")
    check_seed(seed)
    # Mistakes until here are answered without torch.
    from autotune.certification.structures import read
    from autotune.models.whole_model import models_here

    on, folder = options.resolve_device(device), options.results_folder(results)
    asked: dict[str, Any] = {
        "structures": read(structure) if structure else None,
        "paths": options.peers_named(paths or "none") or (),
        "dtypes": tuple(word.strip() for word in dtype.split(",")),
        "device": on,
        "seed": seed,
        "effort": "quick" if quick else "thorough" if thorough else "normal",
    }
    passed, names = True, models_here() if model == "all" else [model]
    for place, name in enumerate(names):
        share = None if seconds is None else options.what_is_left(seconds, begin) / (len(names) - place)
        try:
            passed &= _certified(name, folder, reports, asked | {"budget": share})
        except EquituneError as error:
            if model != "all":
                raise
            print(f"{name}: {error}")
            passed = False
    if not passed:
        raise typer.Exit(FAILED)


def _certified(model: str, results: Path, reports: Path | None, asked: Mapping[str, Any]) -> bool:
    """Write one model's record and page; whether it passed, and no path that is named was refused."""
    from autotune.certification.certificate import Certificate
    from autotune.certification.certificate import certify as measure
    from autotune.certification.checks import CUT, REFUSED
    from autotune.certification.table import verdict_text
    from autotune.report import write_certificate
    from autotune.report.certificate import page_name

    folder = results / "certificates"
    folder.mkdir(parents=True, exist_ok=True)

    def keep(certificate: Certificate) -> None:
        row = certificate.record["paths"][-1]
        print(f"{row['path']}, {row['dtype']}: {verdict_text(row)} ({row['seconds']:.0f} s)", flush=True)
        certificate.save(folder / f"{page_name(certificate.record)}.json")

    certificate = measure(model, **asked, on_path=keep)
    print(certificate)
    print(f"record: {folder / page_name(certificate.record)}.json")
    print(f"page: {write_certificate(certificate.record, reports or reports_dir(results))}")
    named = [row for row in certificate.record["paths"] if asked["paths"] and row["verdict"] in (REFUSED, CUT)]
    for row in named:
        print(f"not certified: {row['path']} in {row['dtype']}, which --paths names, is {row['verdict']}")
    return certificate.passed and not named


# What a whole search space teaches, without a device: ``record``, ``replay`` and ``explain-defaults``.


class ReplayGroup(options.Group):
    usual, argument = "records", "RECORD"
    old = {"--defaults": "defaults"}


replays = typer.Typer(
    cls=ReplayGroup,
    help="Replay stored times without a device: samplers on a RECORD, as `equitune replay records`, or defaults.",
    subcommand_metavar="RECORD... | COMMAND [ARGS]...",
)


@app.command()
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


@app.command()
def explain_defaults(
    device: Annotated[
        str | None, options.argument("DEVICE", "Such as nvidia-h200. Default: all that have a database.")
    ] = None,
    near: Annotated[float, options.option("How near to the best counts: 0.05 is 5%.")] = 0.05,
    most: Annotated[int, options.option("Print so many schedules of each kernel.")] = 5,
    as_json: Annotated[bool, options.option("Print a JSON list with all of them.", "--json")] = False,
    results: options.Results = None,
) -> None:
    """Print, from all trials, the fewest schedules that are near the best everywhere, as rules."""
    from autotune.database.store import device_files, read_table
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


@replays.command(
    epilog=options.examples("equitune replay results/record/*.jsonl.gz --sampler tpe --seeds 5"),
)
def records(
    files: Annotated[
        list[Path], options.argument("RECORD...", "Files of results/record, packed (DEVICE.jsonl.gz) or not.")
    ],
    sampler: Annotated[
        list[str] | None,
        options.search(
            "tpe, climb, gp, random, default, or module:Class of an Optuna sampler. Repeat it for several. "
            "Default: all but classes."
        ),
    ] = None,
    seeds: Annotated[int | None, options.search("Runs of each sampler. Default: 20, for gp 5.")] = None,
    trials: Annotated[int, options.search("Trials of each run.")] = 150,
    ahead: Annotated[int | None, options.search("Proposals in flight. Default: as on the recording machine.")] = None,
    prune: Annotated[bool, options.search("Skip kernels that spill too many registers.", "--prune/--no-prune")] = True,
    transfer: Annotated[
        bool, options.search("Start from winners of related kernels.", "--transfer/--no-transfer")
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


@replays.command(
    epilog=options.examples(
        "equitune replay defaults results/trials/nvidia-h200.jsonl.gz",
        "equitune replay defaults results/trials/nvidia-h200.jsonl.gz --measure 2m",
    )
)
def defaults(
    files: Annotated[list[Path], options.argument("TRIALS...", "A device's trials: results/trials/DEVICE.jsonl.gz.")],
    measure: Annotated[
        str | None,
        options.measuring(
            "On the archive's GPU: measure choices that are only estimates, the most expensive first, for so "
            "long: 60s, 10m."
        ),
    ] = None,
    device: Annotated[str | None, options.measuring("With --measure: cuda or cuda:N.")] = None,
    results: options.Results = None,
) -> None:
    """Fit the model of untuned schedules: what they cost on problems that are held out in turn.

    The trials of results/drawn count too; the fitted model is results/predicted/DEVICE.json. What --measure finds is
    results/replay/measured-DEVICE.json, and counts in every later replay.
    """
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


app.add_typer(replays, name="replay")
app.add_typer(cli_pack.app, name="pack")


@app.command()
def report(
    compare: Annotated[
        tuple[Path, Path] | None,
        options.option("Compare two bench records (or results folders) on one page.", metavar="BEFORE AFTER"),
    ] = None,
    results: options.Results = None,
    reports: options.Reports = None,
) -> None:
    """Rebuild the HTML pages from stored results, or compare two bench records."""
    folder = options.results_folder(results)
    if compare is None:
        options.write_pages(folder, reports, None)
    else:
        from autotune.report import write_comparison

        print(f"report: {write_comparison(*compare, reports or reports_dir(folder), print)}")


@app.command(
    epilog=options.examples(
        "equitune show mace-mp-medium --device cpu",
        'equitune show "128x0e+128x1o" "0e+1o+2e+3o" "0e+1o+2e+3o"',
        'equitune show "8x0e+8x1o" "0e+1o" "8x0e+8x1o" --fully-connected --operation plain',
    )
)
def show(
    problem: Annotated[
        list[str] | None,
        options.argument(
            "PROBLEM",
            "A name of configs/problems.toml, a problem key, or three irreps: of both inputs, and of the output. "
            "Of a channelwise product the third only says which irreps to keep.",
        ),
    ] = None,
    misses: Annotated[
        bool, options.option("Instead list what running models asked for and did not find here.", "--misses")
    ] = False,
    device: Annotated[
        str | None,
        options.option("cpu, cuda, cuda:N, or one that `equitune doctor` lists a database of, such as nvidia-h200."),
    ] = None,
    fully_connected: Annotated[
        bool, options.option("Irreps mean a fully connected product, not a channelwise one.", "--fully-connected")
    ] = False,
    operation: Annotated[
        Literal["conv", "plain"], options.option("Convolution over a graph, or plain tensor product.")
    ] = "conv",
    dtype: Annotated[Literal["float32", "float64"], typer.Option()] = "float32",
    layout: Annotated[
        Literal["mul_ir", "ir_mul"] | None,
        options.option("Default: mul_ir; of another device's database all.", show_default=False),
    ] = None,
    graph_class: Annotated[str | None, options.option("Such as conv-e14-d5. Default: any.")] = None,
) -> None:
    """Print the schedules that a model would load here for a problem, and why; without a problem, all names."""
    from autotune.workload.toml_tables import check_problem_name, problem_names

    if not misses and not problem and not fully_connected:
        print("\n".join(problem_names()))
        options.print_next(typed("show NAME"))
        return
    if not misses and len(problem or ()) == 1 and not fully_connected:
        check_problem_name((problem or [])[0])
    # A mistake until here is answered without torch.
    from autotune.cli.show import device_named, problem_given
    from autotune.cli.show import show as show_text

    if misses:
        show_misses(options.resolve_device(device))
        return
    on = device_named(device)
    found = problem_given(problem or (), fully_connected)
    print(show_text(found, operation=operation, dtype=dtype, layout=layout, device=on, graph_class=graph_class))


if __name__ == "__main__":
    main()
