"""Folders of another user, who may let nobody in: a typed error, or what the documentation says, never another one.

Root may write anywhere, so a forked child becomes another user; without root there is none to become.
"""

from __future__ import annotations

import encodings.utf_8_sig  # noqa: F401  (the other user may not be able to read Python)
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from database_samples import HOST, PROBLEM, entry, store

from autotune.database.lookup import find_schedule
from autotune.database.maintenance import merge_file
from autotune.database.misses import Request, keep_misses, read_misses
from autotune.errors import DatabaseError
from autotune.tune.contribution import write_contribution
from kernelgen.compile import compiler as cache
from kernelgen.compile.pack_file import PackFile, write_pack
from kernelgen.errors import CacheError, PackError

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(params=[0o755, 0o700], ids=["read-only", "closed"])
def locked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of root's with a database, which is also where the cache and the user's own data would be."""
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    folder = tmp_path / "locked"
    store(folder, HOST, entry())
    monkeypatch.setenv("EQUITUNE_DATABASE", str(folder))
    monkeypatch.setenv("EQUITUNE_CACHE", str(folder / "cache"))
    folder.chmod(request.param)
    return folder


def as_nobody(run: Callable[[], None]) -> None:
    """Run in a child process of another user; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_written_and_each_says_so(locked: Path, tmp_path: Path) -> None:
    theirs = store(tmp_path / "theirs", HOST, entry(direction="backward"))
    for path in (theirs, theirs.parent):
        path.chmod(0o755)
    sample = entry()
    kernel = (sample.problem, sample.operation, "backward", sample.dtype, sample.layout, False)

    def run() -> None:
        with pytest.raises(CacheError, match="set EQUITUNE_CACHE"):
            cache.publish("0" * 64, "kernel.so", b"", "kernel.cpp", "", {})
        assert cache.find("0" * 64, "kernel.so") is None
        assert keep_misses(HOST, [Request(*kernel, 11872, 424)]) is False and read_misses(HOST) == []
        with pytest.raises(DatabaseError, match="cannot write the tuned database"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merge_file(theirs, locked)
        with pytest.raises((DatabaseError, OSError)):
            write_contribution(tmp_path / "theirs", HOST.slug, locked / "sent.tar.gz")
        with pytest.raises(PackError, match="cannot be written"):
            write_pack(locked / "one.pack", {"kernels": []}, [])
        with pytest.raises(PackError, match="cannot be read"):
            PackFile(locked / "one.pack")

    before = sorted(path.name for path in locked.iterdir())
    as_nobody(run)
    assert sorted(path.name for path in locked.iterdir()) == before


def test_a_lookup_reads_what_it_may(locked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("autotune.paths.results_dir", lambda: tmp_path / "none")
    wanted = "exact" if locked.stat().st_mode & 0o004 else "default"

    def run() -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = find_schedule(PROBLEM, "conv", "forward", "float32", "mul_ir", HOST, "conv-e14-d5")
        assert found.origin == wanted
        assert (wanted == "exact") == (not told) and all("Permission denied" in str(one.message) for one in told)

    as_nobody(run)
