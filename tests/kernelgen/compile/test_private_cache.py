"""The cache of compiled kernels accepts nothing that another user wrote, and reports when it is full."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import doctor
from kernelgen import CacheError, device_facts
from kernelgen.compile import compiler as cache
from kernelgen.compile.compiler import compile_source
from kernelgen.kernels.source import Source

HOST = device_facts("cpu")
ANSWER = Source('extern "C" int equitune_kernel() { return 42; }\n', "c++")
# Paths that are checked before a kernel is loaded, relative to the entry's folder.
LEVELS = ["../..", "..", ".", "entry.json", "kernel.so"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EQUITUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def entry() -> Path:
    """The folder of a compiled kernel."""
    return compile_source(ANSWER, HOST).path.parent


def refuses(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """The kernel in the cache is neither used nor replaced, and the message is one line."""
    monkeypatch.setattr("kernelgen.compile.host.build", lambda *_: pytest.fail("compiled again"))
    with pytest.raises(CacheError, match=message) as caught:
        compile_source(ANSWER, HOST)
    assert "\n" not in str(caught.value) and "EQUITUNE_CACHE" in str(caught.value)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_what_is_written_is_closed_to_others(own_cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        compile_source(ANSWER, HOST)
    finally:
        os.umask(before)
    made = [own_cache, *own_cache.rglob("*")]
    assert len(made) == 6
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700, 0o600}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [0o722, 0o720, 0o702])
def test_what_others_may_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, entry: Path, level: str, mode: int
) -> None:
    path = (entry / level).resolve()
    path.chmod(mode)
    refuses(monkeypatch, f"{re.escape(str(path))} .*mode 0{mode:o}.* chmod -R go-w {re.escape(str(own_cache))}")
    path.chmod(0o755)
    assert compile_source(ANSWER, HOST).path.parent == entry, "readable by others is no harm"


@as_root
@pytest.mark.parametrize("level", LEVELS)
def test_what_another_user_owns_is_refused(monkeypatch: pytest.MonkeyPatch, entry: Path, level: str) -> None:
    path = (entry / level).resolve()
    os.chown(path, 12345, 12345)
    refuses(monkeypatch, f"{re.escape(str(path))} .*belongs to user 12345, not to you")


@as_root
def test_a_link_that_another_user_owns_is_refused(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, entry: Path
) -> None:
    """Its owner could redirect it between the check of a kernel and its loading."""
    own_cache.rename(own_cache.with_name("moved"))
    own_cache.symlink_to("moved")
    assert compile_source(ANSWER, HOST).path.parent == entry
    os.chown(own_cache, 12345, 12345, follow_symlinks=False)
    refuses(monkeypatch, "belongs to user 12345")


def test_the_folder_of_another_user_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    own_cache.mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    refuses(monkeypatch, f"belongs to user {user}, not to you .user {user + 1}")
    with pytest.raises(CacheError, match="belongs to user"):
        cache.publish(cache.digest("key"), "kernel.so", b"binary", "kernel.cpp", "source", {})
    assert not list(own_cache.iterdir())


def test_doctor_names_a_cache_that_is_not_private(own_cache: Path) -> None:
    def rows() -> list[doctor.Finding]:
        return [finding for finding in doctor.examine() if finding.name == "compiled kernels"]

    assert [row.state for row in rows()] == ["ok"], "a cache that is not there yet is no problem"
    own_cache.mkdir()
    own_cache.chmod(0o777)
    assert [row.state for row in rows()] == ["ok", "problem"]
    assert "chmod -R go-w" in rows()[1].value


def fail(code: int, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
    """A write function that fails with ``code`` for files of that name."""

    def attempt(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == name:
            raise OSError(code, os.strerror(code), str(path))
        return write(path, *arguments, **named)

    return attempt


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("name", "advice"), [("kernel.so", "EQUITUNE_CACHE"), ("entry.json", "EQUITUNE_CACHE"), ("kernel.cpp", "TMPDIR")]
)
def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path, code: int, name: str, advice: str
) -> None:
    with monkeypatch.context() as patched:
        for method in ("write_bytes", "write_text"):
            patched.setattr(Path, method, fail(code, name, getattr(Path, method)))
        with pytest.raises(CacheError, match=f"{re.escape(os.strerror(code))}.*{advice}") as caught:
            compile_source(ANSWER, HOST)
    assert "\n" not in str(caught.value)
    assert not list(own_cache.glob("*/*")), "nothing half-written stays"
    assert compile_source(ANSWER, HOST).path.exists()
