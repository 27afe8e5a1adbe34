"""``equitune db``: manage tuned databases."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autotune.cli import options
from autotune.errors import ConfigError
from autotune.paths import typed
from kernelgen.errors import EquituneError

if TYPE_CHECKING:
    from autotune.database.entry import Entry
    from autotune.database.maintenance import Merged, Stale
    from autotune.database.store import Table
    from kernelgen.device import DeviceFacts

app = typer.Typer(
    help="Manage tuned databases: list stale entries, verify, retune, merge, export, share.",
    epilog=options.examples("equitune db stale", "equitune db retune --budget 30m", "equitune db merge theirs.json"),
    no_args_is_help=True,
)

Problems = Annotated[
    list[str] | None, options.option("Only entries of this problem. Repeat it for several.", "--problem")
]


@app.command()
def stale(
    device: options.Device = None,
    results: options.Results = None,
    as_json: options.Json = False,
) -> None:
    """List this device's entries whose generator, compiler or driver has changed."""
    from kernelgen.device import device_facts

    facts = device_facts(options.resolve_device(device))
    table = _table(results, facts.slug)
    found = _stale(table, facts)
    if as_json:
        print(json.dumps([{"identity": item.entry.identity, "reasons": item.reasons} for item in found], indent=1))
        return
    for item in found:
        print(f"{_name(item.entry)}: {'; '.join(item.reasons)}")
    print(f"{len(found)} of {len(table.by_identity)} entries of {facts.name} are stale")
    if found:
        options.print_next(typed("db retune"))


@app.command()
def verify(
    problem: Problems = None,
    uncertified: Annotated[
        bool, options.option("Only entries without a certificate; no times are taken.", "--uncertified")
    ] = False,
    device: options.Device = None,
    results: options.Results = None,
) -> None:
    """Check and time this device's entries again, and write the certificates that are missing.

    Entries with wrong results, or with a certificate above their tolerance, are marked and no longer loaded. Then the
    exit code is 1.
    """
    from autotune.database.store import Database, database_path
    from autotune.tune.publish import Verdict, is_certified, recheck
    from kernelgen.device import device_facts

    device = options.resolve_device(device)
    database = Database.load(database_path(options.results_folder(results), device_facts(device).slug))
    wanted = [entry for entry in database.entries if not problem or entry.label in problem]
    wanted = [entry for entry in wanted if not (uncertified and is_certified(entry))]

    def tell(verdict: Verdict) -> None:
        ratio = "" if verdict.ratio is None else f" {verdict.ratio:.2f}x"
        print(f"{_name(verdict.entry)}: {verdict.state}{ratio} {verdict.reason}".rstrip(), flush=True)
        if verdict.state != "skipped":
            database.put(verdict.noted)
            database.save()

    states = [verdict.state for verdict in recheck(wanted, device, tell, times=not uncertified)]
    print(f"{len(wanted)} entries: " + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    if "wrong" in states:
        raise typer.Exit(1)


@app.command()
def retune(
    device: options.Device = None,
    budget: options.Budget = None,
    trials: options.Trials = None,
    peers: options.Peers = None,
    no_peers: options.NoPeers = False,
    results: options.Results = None,
) -> None:
    """Tune entries again that are stale or failed their last check."""
    begin = time.monotonic()
    from autotune.tune.publish import workloads_of
    from autotune.tune.run import tune
    from autotune.workload.config import TuneConfig
    from kernelgen.device import device_facts

    seconds = options.budget_seconds(budget)
    device, folder = options.resolve_device(device), options.results_folder(results)
    facts = device_facts(device)
    table = _table(results, facts.slug)
    stale = [item.entry for item in _stale(table, facts)]
    known = {entry.identity for entry in stale}
    stale += [entry for key, entry in table.by_identity.items() if entry.failed_check and key not in known]
    objectives = list(dict.fromkeys(entry.objective for entry in stale)) or ["time"]
    with_peers = options.peers_asked(peers, no_peers, None)
    for position, objective in enumerate(objectives):
        of_objective = [entry for entry in stale if entry.objective == objective]
        workloads = []
        for same, workload in workloads_of(of_objective, by_size=True):
            if isinstance(workload, EquituneError):
                print(f"{_name(same[0])}: skipped, {workload}")
            else:
                workloads.append(workload)
        by = "" if objectives == ["time"] else f" by {objective}"
        print(f"tuning {len(of_objective)} entries of {len(workloads)} workloads again{by}")
        if workloads:
            config = TuneConfig(folder / "stale entries", tuple(workloads))
            left = None if seconds is None else options.what_is_left(seconds, begin) / (len(objectives) - position)
            tune(config, device, left, trials, None, None, 0, folder, with_peers, None, objective)


@app.command()
def merge(
    files: Annotated[list[Path], options.argument("FILE...", "Database files, or contributions, of any device.")],
    results: options.Results = None,
) -> None:
    """Merge database files into the local databases. Prints which entry wins each conflict, and why."""
    from autotune.database.maintenance import merge_file
    from autotune.tune.contribution import database_in

    for file in files:
        with database_in(file) as database:
            target, merged = merge_file(database, options.results_folder(results))
        _print_merged(f"{file} -> {target}", merged)


@app.command(
    epilog=options.examples("equitune db export mine.json", "equitune db export formats --format t4"),
)
def export(
    path: Annotated[Path, options.argument("PATH", "The file to write; with --format t4 a folder. It must not exist.")],
    problem: Problems = None,
    form: Annotated[
        Literal["equitune", "t4"],
        options.option("t4: the autotuning community's T1 and T4, and caches for Kernel Tuner.", "--format"),
    ] = "equitune",
    device: options.Device = None,
    results: options.Results = None,
) -> None:
    """Write this device's entries to a database file, to share or contribute.

    With --format t4: the databases and trials of all devices (--device: of one) in formats that other autotuners read.
    """
    from kernelgen.device import device_facts

    slug = device_facts(options.resolve_device(device)).slug if device or form == "equitune" else None
    if form == "t4":
        from autotune.replay.open_formats import export_results

        done = export_results(options.results_folder(results), path, slug, problem or ())
        print(f"{path}: {done.entries} entries, {done.trials} trials of {done.studies} studies, {done.devices} devices")
        if done.unnamed:
            print(f"{len(done.unnamed)} studies that no entry cites are left out, such as {done.unnamed[0]}")
        return
    from autotune.database.maintenance import export_file

    count = export_file(_table(results, str(slug)), path, problem or ())
    print(f"{path}: {count} entries")
    options.print_next(f"on the other machine: equitune db merge {path.name}")


@app.command("import")
def import_(
    files: Annotated[list[Path], options.argument("FILE...", "STUDY.t4.json, by `equitune db export --format t4`.")],
    results: options.Results = None,
) -> None:
    """Add the trials of T4 files to the trials here, from which `equitune tune` goes on."""
    from autotune.replay.open_formats import import_trials

    for file in files:
        target, count = import_trials(file, options.results_folder(results))
        print(f"{file} -> {target}: {count} new trials")


@app.command(
    epilog=options.examples(
        "equitune db pull /shared/equitune", "equitune db pull https://example.org/equitune --sha256 0f3a..."
    )
)
def pull(
    source: Annotated[str, options.argument("SOURCE", "A folder, or a URL that begins with https://.")],
    sha256: Annotated[str | None, options.option("Take only the file with this SHA-256.")] = None,
    of: Annotated[str | None, options.option("Of another device, such as nvidia-h200.", metavar="DEVICE")] = None,
    device: options.Device = None,
    results: options.Results = None,
) -> None:
    """Take this device's entries from a shared database; those without a certificate or a legal launch are refused."""
    from autotune.database.maintenance import pull as pull_from
    from kernelgen.device import device_facts

    facts = None if of else device_facts(options.resolve_device(device))
    slug = of or (facts.slug if facts else "")
    target, digest, merged = pull_from(source, slug, options.results_folder(results), sha256, facts)
    _print_merged(f"{source} -> {target}", merged)
    options.print_next(f"to pin what you took: --sha256 {digest}")


@app.command(epilog=options.examples("equitune db push /shared/equitune"))
def push(
    folder: Annotated[str, options.argument("FOLDER", "The shared database. It is made if it is missing.")],
    problem: Problems = None,
    device: options.Device = None,
    results: options.Results = None,
) -> None:
    """Put this device's entries into a folder that others pull from; the better of two entries stays there."""
    from autotune.database.maintenance import push as push_to
    from kernelgen.device import device_facts

    slug = device_facts(options.resolve_device(device)).slug
    target, digest, merged = push_to(options.results_folder(results), slug, folder, problem or ())
    _print_merged(str(target), merged, f"; sha256 {digest}")


@app.command()
def contribute(
    path: Annotated[Path, options.argument("FILE", "The archive to write, such as a100.tar.gz.")],
    device: options.Device = None,
    budget: options.Budget = None,
    trials: options.Trials = None,
    results: options.Results = None,
) -> None:
    """Tune all that is shipped for this device, and write one file to send to the project.

    Trials are kept: interrupt it, and go on with the same command.
    """
    begin = time.monotonic()
    from autotune.tune.contribution import SUFFIX, whole_config, write_contribution
    from autotune.tune.run import tune
    from kernelgen.device import device_facts

    if not path.name.endswith(SUFFIX):
        raise ConfigError(f"the file is {path}; expected a name that ends with {SUFFIX}")
    seconds = options.budget_seconds(budget)
    device, folder = options.resolve_device(device), options.results_folder(results)
    facts = device_facts(device)
    seconds = None if seconds is None else options.what_is_left(seconds, begin)
    tune(whole_config(facts.backend), device, seconds, trials, None, None, 0, folder, False, None)
    count = write_contribution(folder, facts.slug, path)
    print(f"{path}: {count} entries of {facts.name}")
    options.print_next(f"attach {path.name} to an issue of the project")


@app.command()
def pack(results: options.Results = None) -> None:
    """Pack the trials that entries cite, and the records, into one file per device, as the repository keeps them."""
    from autotune.database.maintenance import pack_trials
    from autotune.database.store import device_files

    folder = options.results_folder(results)
    recorded = {path.name for path in (folder / "record").glob("*/")}
    for slug in sorted(recorded | {file.stem for file in device_files(folder)}):
        for packed in pack_trials(folder, slug):
            if packed.lines:
                print(f"{packed.path}: {packed.lines} records (studies: {packed.studies})")
            if packed.missing:
                print(f"{len(packed.missing)} studies that entries cite are missing, such as {packed.missing[0]}")


@app.command()
def check(
    arch: Annotated[
        str, options.option("Such as sm_80,sm_86, or gfx942 (AMD, by clang). Default: all of NVIDIA.")
    ] = "all",
    sample: Annotated[
        int | None, options.option("Compile only so many kernels each, evenly from all kinds.", min=1)
    ] = None,
    defaults: Annotated[
        bool, options.option("Also the default schedules of the shipped configs.", "--defaults/--no-defaults")
    ] = True,
    limit: Annotated[
        str | None, options.option("Begin no other kernel after this time, with units: 90s, 30m. Shared evenly.")
    ] = None,
) -> None:
    """Compile what users of other GPUs would get, and compare it with their limits. No GPU is needed.

    Each tuned entry is looked up as on a card of that architecture. Takes minutes for each. Kernels for AMD GPUs
    compile and are emulated, but were never run.
    """
    from autotune.replay.portability import check_arch, expected_transfer
    from autotune.workload.toml_tables import parse_duration
    from kernelgen.device import CUDA_ARCHS

    failed, names = 0, list(CUDA_ARCHS if arch == "all" else dict.fromkeys(arch.split(",")))
    end = time.monotonic() + (math.inf if limit is None else parse_duration(limit))
    for place, name in enumerate(names):
        share = (end - time.monotonic()) / (len(names) - place)
        report = check_arch(name.strip(), sample, defaults, limit_s=max(0.0, share))
        print(report.summary, flush=True)
        if expected := expected_transfer(report.facts):
            print(f"  {expected}", flush=True)
        for finding in report.faults:
            print(f"  {finding.kernel.kind} {finding.kernel.name}: {finding.fault}")
        failed += len(report.faults)
    if failed:
        raise typer.Exit(1)


def _print_merged(what: str, merged: list[Merged], end: str = "") -> None:
    """Conflicts and refusals, then how many entries there were of each kind."""
    from autotune.database.maintenance import counts

    for item in merged:
        if item.reason not in ("new here", "the same as here"):
            print(f"{_name(item.entry)}: {'taken' if item.taken else 'kept out'}, {item.reason}")
    print(f"{what}: {', '.join(f'{count} {name}' for name, count in counts(merged).items())}{end}")


def _name(entry: Entry) -> str:
    parts = ("label", "operation", "direction", "dtype", "layout", "graph_class")
    return " ".join(str(getattr(entry, part)) for part in parts)


def _stale(table: Table, facts: DeviceFacts) -> list[Stale]:
    from autotune.database.maintenance import driver_version, software_versions, stale_entries

    return stale_entries(table, software_versions(facts), driver_version(facts))


def _table(results: Path | None, slug: str) -> Table:
    from autotune.database.store import database_path, read_table

    return read_table(database_path(options.results_folder(results), slug))
