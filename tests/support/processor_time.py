"""Processor seconds of each test, its processes included: a test that takes too many without ``slow`` is named.

Tests of a GPU may take what they need: neither a newcomer nor CI waits for them. Seconds of the clock would depend on
what else the machine does. A test may pay for what all share (a kernel that no test has compiled yet, the server of
worker processes), so a test fails beyond :data:`FAILS_S`, and is only named at the end of the run beyond
:data:`NAMED_S`. None fails without xdist, whose test processes have one torch thread each: idle threads spin.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

NAMED_S = 5.0
FAILS_S = 60.0
PROPERTY = "processor seconds"

_TICKS = os.sysconf("SC_CLK_TCK")
_begun = pytest.StashKey[float]()


def processor_s(pid: int | str = "self") -> float:
    """Of a process, of its descendants that live, and of those that it has waited for; 0 without ``/proc``."""
    found = 0.0
    with contextlib.suppress(OSError):
        # The name, in parentheses, may contain anything.
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        found = sum(map(int, fields[11:15])) / _TICKS
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += sum(map(processor_s, map(int, _read(f"/proc/{pid}/task/{thread}/children").split())))
    return found


def _read(path: str) -> bytes:
    """Of a small file; twice per test, of each thread, so that ``Path`` would cost seconds."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_begun] = processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "call":
        took = processor_s() - item.stash[_begun]
        report.user_properties.append((PROPERTY, took))
        free = "PYTEST_XDIST_WORKER" not in os.environ or any(map(item.get_closest_marker, ("slow", "gpu")))
        if took > FAILS_S and report.passed and not free:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {took:.0f} processor seconds, more than {FAILS_S:.0f}: make it cheaper, or mark "
                "it slow if something cheaper covers the same"
            )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line a file."""
    files = defaultdict(list)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            took = dict(report.user_properties).get(PROPERTY, 0.0)
            if took > NAMED_S and "slow" not in report.keywords:
                file, _, name = report.nodeid.partition("::")
                files[file].append((took, name))
    if files:
        terminalreporter.section(f"more than {NAMED_S:.0f} processor seconds")
    for file, tests in sorted(files.items(), key=lambda of: -sum(took for took, _ in of[1])):
        most = ", ".join(f"{name} {took:.1f}" for took, name in sorted(tests, reverse=True)[:3])
        terminalreporter.line(f"{sum(took for took, _ in tests):6.1f} s in {len(tests)} tests of {file}: {most}")
