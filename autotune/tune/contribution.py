"""One file with all that a device's tuning found, to send to the project; and the database in such a file."""

from __future__ import annotations

import itertools
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.database import trials as trial_archive
from autotune.database.maintenance import pack_trials
from autotune.database.store import database_path, read_table
from autotune.errors import DatabaseError
from autotune.workload.config import TuneConfig, load_config
from autotune.workload.workload import Workload
from kernelgen.errors import cause_of

# What is tuned for a device that is to be shipped: the configs of the H200's database.
CONFIGS = ("h200", "connected", "harmonics", "vectors", "contraction")
# Trials of a direction where the config names no number.
TRIALS = 32
SUFFIX = ".tar.gz"
# Most bytes of a file in a contribution; the largest has 2 million.
MOST_BYTES = 1 << 28


def whole_config(backend: str, names: tuple[str, ...] = CONFIGS) -> TuneConfig:
    """The workloads of several configs, in their order, as one config without a budget.

    A workload has the trials that its config gives it, else ``TRIALS``.
    """
    trials: dict[Workload, int] = {}
    for config in (load_config(name, backend) for name in names):
        for workload in config.workloads:
            trials.setdefault(workload, config.workload_trials.get(workload, config.trials or TRIALS))
    return TuneConfig(Path("+".join(names)), tuple(trials), workload_trials=trials)


def write_contribution(results_dir: Path, slug: str, path: Path) -> int:
    """Write a device's database and the trials that it cites to an archive; returns the number of entries.

    DatabaseError if there is nothing to send, or the file cannot be written.
    """
    database = database_path(results_dir, slug)
    count = len(read_table(database).by_identity) if database.is_file() else 0
    if not count:
        raise DatabaseError(f"{database} has no entries to send; expected those of a finished `equitune tune`")
    pack_trials(results_dir, slug)
    trials = trial_archive.archive_of(results_dir / "trials" / slug)
    try:
        with tarfile.open(path, "w:gz") as archive:
            archive.add(database, database.name)
            if trials.is_file():
                archive.add(trials, f"trials/{trials.name}")
    except OSError as error:
        raise DatabaseError(f"{path} cannot be written ({cause_of(error)})") from error
    return count


@contextmanager
def database_in(path: Path) -> Iterator[Path]:
    """The database file in a contribution, unpacked beside its trials; any other file as it is.

    DatabaseError for an archive that is damaged or holds anything else: it comes from another machine.
    """
    if not path.name.endswith(SUFFIX):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(path, "r:gz") as archive:
                members = list(itertools.islice(_bounded(archive), 3))
                files = [member for member in members if member.isfile()]
                names = [member.name for member in files if "/" not in member.name and member.name.endswith(".json")]
                allowed = {f"{names[0]}", f"trials/{Path(names[0]).stem}{trial_archive.SUFFIX}"} if names else set()
                if (
                    len(names) != 1
                    or len(members) > min(2, len(files))
                    or {member.name for member in members} - allowed
                ):
                    raise DatabaseError(f"{path} is no contribution; expected what `equitune db contribute` wrote")
                for member in files:
                    source = archive.extractfile(member)
                    assert source is not None  # it is a file
                    target = Path(folder) / member.name
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(source.read())
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
            raise DatabaseError(f"{path} cannot be read ({error})") from error
        yield Path(folder) / names[0]


def _bounded(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Its members, read one by one. ValueError at a large one: a few kilobytes can unpack to any number."""
    for member in archive:
        if member.size > MOST_BYTES:
            raise ValueError(f"it holds {member.size} bytes, more than a database has")
        yield member
