"""What is running, the best so far and the time left: on a terminal, and as a line every ten seconds in a log."""

from __future__ import annotations

import io
import types
from typing import Any

import pytest
from rich.console import Console

from autotune.text import joules_text
from autotune.tune import settings
from autotune.tune.settings import Progress


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(settings, "time", clock)
    return clock


def study(trials: int) -> Any:
    return types.SimpleNamespace(
        finished=range(trials), best={"time_us": 4200.0}, default={"time_us": 5100.0}, failures=1
    )


def test_a_log_has_a_line_every_ten_seconds(clock: Clock) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False, width=200)) as progress:
        progress.end = clock.now + 60
        progress.start("mace forward", study(3), 40)
        for _ in range(26):
            clock.now += 1
            progress.update()
        progress.stop()
        progress.start("mace: comparing forward")
        clock.now += 11
        progress.start("mace: comparing backward")
        clock.now += 30
        progress.update()
    lines = [line.replace("\xa0", " ") for line in out.getvalue().splitlines()]
    assert lines == [
        "mace forward: 3/40 trials, best 4.20 ms, default 5.10 ms, 1 failed, 50 s left",
        "mace forward: 3/40 trials, best 4.20 ms, default 5.10 ms, 1 failed, 40 s left",
        "mace forward: 3/40 trials, best 4.20 ms, default 5.10 ms, 1 failed",
        "mace: comparing backward: 23 s left",
        "mace: comparing backward: 7 s over the budget",
    ]


def test_a_terminal_shows_the_same(clock: Clock) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=200)) as progress:
        progress.end = clock.now + 60
        progress.start("mace forward", study(3), None)
        progress._bar.refresh()
        progress.start("mace: comparing forward")
        progress._bar.refresh()
    shown = out.getvalue().replace("\xa0", " ")
    for words in ("mace forward", "3 trials", "best 4.20 ms", "60 s left", "mace: comparing forward"):
        assert words in shown


def test_who_watches_is_told_the_same_every_few_seconds(clock: Clock) -> None:
    seen: list[tuple[list[str], bool]] = []
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Progress(console, watch=lambda lines, new: seen.append((list(lines), new))) as progress:
        progress.start("mace forward", study(3), 40)
        for _ in range(6):
            clock.now += 1
            progress.update()
        progress.stop()
        progress.published()
    line = "mace forward: 3/40 trials, best 4.20 ms, default 5.10 ms, 1 failed"
    seen = [([one.replace("\xa0", " ") for one in lines], new) for lines, new in seen]
    assert seen == [([line], False), ([line], False), ([line], True)]


def test_a_search_of_another_objective_shows_its_figures() -> None:
    best = {"time_us": 4200.0, "joules": 0.00123, "memory_bytes": 2.5e6}
    shown = settings.status_text(types.SimpleNamespace(best=best, default={"time_us": 5100.0}, failures=0))  # type: ignore[arg-type]
    assert shown.replace("\xa0", " ") == "best 4.20 ms and 1.23 mJ and 2.50 MB, default 5.10 ms, 0 failed"
    texts = {value: joules_text(value).replace("\xa0", " ") for value in (12.5, 0.4, 2e-7)}
    assert texts == {12.5: "12.5 J", 0.4: "400 mJ", 2e-7: "0.200 µJ"} and joules_text(0.0) == joules_text(float("nan"))
