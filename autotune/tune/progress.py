"""Show a search's progress: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autotune.search.study import Study
from autotune.text import time_text

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 10.0


def status_text(study: Study, end: float | None, now: float) -> str:
    """State of a search: best time against the default, failures and time left; ``end`` and ``now`` in seconds."""
    parts = []
    if study.best_us is not None:
        gain = f" ({study.default_us / study.best_us:.2f}x the default)" if study.default_us else ""
        parts.append(f"best {time_text(study.best_us)}{gain}")
    parts.append(f"{study.failures} failed")
    if end is not None:
        parts.append(f"{max(0.0, end - now):.0f} s left")
    return ", ".join(parts)


class Progress:
    """Follows one search at a time; use as a context manager. ``tuner``: name to print, among several tuners."""

    def __init__(self, console: Console | None = None, tuner: str = "") -> None:
        from rich import progress
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self._prefix = f"[{tuner}] " if tuner else ""
        names = ("{task.description}", "{task.fields[count]}", "{task.fields[status]}")
        title, *figures = (progress.TextColumn(name, markup=False) for name in names)
        columns = (title, progress.BarColumn(bar_width=20), *figures)
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task: Any = None
        self._study: Study | None = None
        self._last_line = 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, title: str, study: Study, trials: int | None, end: float | None) -> None:
        """Follow a study until ``trials`` are finished or ``time.monotonic()`` reaches ``end``."""
        self.stop()
        self._title, self._study, self._trials, self._end, self._begin = title, study, trials, end, time.monotonic()
        self._task = self._bar.add_task(title, total=1.0, count="", status="starting")
        self._last_line = time.monotonic()
        self.update()

    def update(self) -> None:
        """Show the study's present state."""
        if self._study is None:
            return
        now, done = time.monotonic(), len(self._study.finished)
        count = f"{done} trials" if self._trials is None else f"{done}/{self._trials} trials"
        status = status_text(self._study, self._end, now)
        self._bar.update(self._task, completed=self._fraction(now, done), count=count, status=status)
        self._line = f"{self._title}: {count}, {status}"
        if not self.console.is_terminal and now - self._last_line >= LINE_EVERY_S and done != self._trials:
            self.note(self._line)
            self._last_line = now

    def stop(self) -> None:
        """Print the final line of a search."""
        if self._study is not None:
            self._end = None
            self.update()
            self._bar.remove_task(self._task)
            self.note(self._line)
        self._study = None

    def note(self, text: str) -> None:
        """Print one line of plain text."""
        self.console.print(f"{self._prefix}{text}", markup=False, highlight=False, soft_wrap=True)

    def _fraction(self, now: float, done: int) -> float:
        by_trials = done / self._trials if self._trials else 0.0
        by_time = (now - self._begin) / max(1e-9, self._end - self._begin) if self._end is not None else 0.0
        return min(1.0, max(by_trials, by_time))
