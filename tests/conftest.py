"""What all tests share: the ``gpu`` marker, a browser, few torch threads, and no influence of the user's own databases.

The compile cache is left alone on purpose: a kernel that one test compiled serves every later test and run.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Test processes share the cores, and so do the processes that tests start. torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from browser import browser, visit
from covering import leave_others_to_slow, outside
from processor_time import pytest_runtest_makereport, pytest_runtest_protocol, pytest_terminal_summary

import kernelgen.compat  # noqa: F401  (before a test imports e3nn: 0.4 loads only so with a recent torch)
from kernelgen.compile.compiler import cache_dir
from kernelgen.compile.host import HOST_FLAGS, find_host_compiler

__all__ = ["browser", "pytest_runtest_makereport", "pytest_runtest_protocol", "pytest_terminal_summary", "visit"]

# Of the C++ kernels.
USUAL_HEADERS = ("cstdint", "cstring", "type_traits", "utility", "cstdlib", "new", "omp.h", "sched.h")


def pytest_configure(config: pytest.Config) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell, which ignores Ctrl-C for it: the tests of Ctrl-C need it back.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("EQUITUNE_STRICT", "EQUITUNE_DEBUG", "EQUITUNE_STRUCTURES", "EQUITUNE_PACK", "EQUITUNE_PACKS"):
        os.environ.pop(name, None)
    # Messages name commands as they are typed where the environment is active.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, what in (("--others", "the cases beyond those that cover"), ("--slow", "the tests marked slow")):
        help_ = f"of {what}, every N-th from the K-th (default: 0/1, all)"
        parser.addoption(option, default="0/1", metavar="K/N", help=help_)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = leave_others_to_slow(items)
    left_out = {*outside(config.getoption("--slow"), slow), *outside(config.getoption("--others"), others)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    # The longest first: at the end no process waits for another's. Files stay whole, for they share what they made.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_collection_finish() -> None:
    """Collections of garbage need not scan torch and all tests again: they took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_user_database(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Databases that the user tuned at home neither change a test nor are changed by one."""
    os.environ["EQUITUNE_DATABASE"] = str(tmp_path_factory.mktemp("user-database"))
    os.environ["EQUITUNE_MISSES"] = "0"


@pytest.fixture(scope="session")
def quick_flags() -> tuple[str, ...]:
    """Link the C++ library alone, for any process has the others, and parse the usual headers once for all kernels.

    OpenMP's library is named by its path.
    """
    compiler = find_host_compiler() if shutil.which("g++") and "CXX" not in os.environ else None
    if compiler is None or not any("libgomp" in flag for flag in compiler.flags):
        return ()
    header = cache_dir() / "headers-of-tests" / "usual.hpp"
    header.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=header.parent) as folder:
        text, parsed = Path(folder) / "usual.hpp", Path(folder) / "usual.hpp.gch"
        text.write_text("".join(f"#include <{name}>\n" for name in USUAL_HEADERS))
        flags = [flag for flag in HOST_FLAGS if flag not in ("-O3", "-shared")]
        subprocess.run([compiler.path, "-x", "c++-header", text, *flags, "-O0", "-fopenmp", "-o", parsed], check=True)
        for made in (parsed, text):
            made.replace(header.parent / made.name)
    return ("-nodefaultlibs", "-lstdc++", "-include", str(header))


@pytest.fixture(autouse=True)
def host_kernels_compile_quickly(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, quick_flags: tuple[str, ...]
) -> None:
    """In a third of the time: kernels write their vectors out, so that optimising changes no more than speed.

    Tests marked ``slow`` have the flags that users have, but for those that ask for ``quick_kernels``; so have worker
    processes and commands.
    """
    is_slow = request.node.get_closest_marker("slow") is not None
    if "quick_kernels" in request.fixturenames if is_slow else "users_flags" not in request.fixturenames:
        quick = tuple("-O0" if flag == "-O3" else flag for flag in HOST_FLAGS)
        monkeypatch.setattr("kernelgen.compile.host.HOST_FLAGS", quick + quick_flags)


@pytest.fixture
def users_flags() -> None:
    """For a test that compares with what another process compiled."""


@pytest.fixture
def quick_kernels() -> None:
    """For a slow test of values alone, whose kernels are many or large."""


@pytest.fixture(autouse=True)
def no_compiled_code_of_other_tests() -> Iterator[None]:
    """torch.compile stops at eight compilations of one function, and which tests share a process changes."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]:
        dynamo.reset()
        dynamo.utils.counters.clear()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shipped database, and an empty one of the user's own beside it."""
    from autotune import paths

    monkeypatch.delenv("EQUITUNE_STRICT", raising=False)
    monkeypatch.setenv("EQUITUNE_DATABASE", str(tmp_path / "user"))
    monkeypatch.setattr(paths, "results_dir", lambda: tmp_path / "shipped")
    return tmp_path / "shipped"
