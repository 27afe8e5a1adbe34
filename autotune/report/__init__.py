"""The HTML report: a page per device, built from results/ alone, and pages that compare bench records.

Nothing is measured here. pandas, matplotlib and Optuna are only imported when a table or a page is built.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ReportError
from autotune.paths import named_in_errors

if TYPE_CHECKING:
    from autotune.report.render import Page

# How often a page that is watched loads itself again.
REFRESH_S = 5
# Most lines of what runs above it.
SHOWN_LINES = 12

__all__ = ["LivePage", "ReportError", "summary_table", "write_certificate", "write_comparison", "write_reports"]


def write_reports(results_dir: str | Path, reports_dir: str | Path, only: str | None = None) -> list[Path]:
    """Write ``reports_dir/DEVICE.html`` for every device in ``results_dir``; returns the paths, sorted.

    What opens on the page on demand is in ``DEVICE.details.js`` and ``DEVICE.sources/`` beside it.

    only: the slug of the only device to write. Equal results give equal bytes. Raises ReportError for an unreadable
    results file, before any page is replaced.
    """
    from autotune.report.devices import all_rows, device_slugs, load_device
    from autotune.report.page import build_page

    results, reports = Path(results_dir), Path(reports_dir)
    slugs = [slug for slug in device_slugs(results) if only in (None, slug)]
    others = all_rows(results)
    pages = [build_page(load_device(results, slug), others) for slug in slugs]
    reports.mkdir(parents=True, exist_ok=True)
    return [_publish(reports, page) for page in pages]


class LivePage:
    """A device's page while it grows: above it stands what runs, and it loads itself again every few seconds.

    At the end of a ``with`` the plain page is left.
    """

    def __init__(self, results_dir: Path, reports_dir: Path, slug: str) -> None:
        self.results, self.reports, self.slug = results_dir, reports_dir, slug
        self.path = reports_dir / f"{slug}.html"
        self._html, self._lines, self._seen = "", list[str](), list[int]()

    def __enter__(self) -> LivePage:
        self.show(["starting"], True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._html:
            _write(self.path, self._html)
        else:
            self.path.unlink(missing_ok=True)

    def show(self, lines: Sequence[str], published: bool) -> None:
        """Write the page with ``lines``; with new results if they were ``published``, which takes seconds."""
        from markupsafe import escape

        from autotune.report.render import render

        if published:
            pages = write_reports(self.results, self.reports, self.slug)
            self._html = pages[0].read_text("utf-8") if pages else ""
        html = self._html or render("waiting.html", self.slug, {}, sections=()).text
        charset, header = '<meta charset="utf-8">', "<header>"
        refresh = f'{charset}\n<meta http-equiv="refresh" content="{REFRESH_S}">'
        running = f"{header}<pre>{escape(chr(10).join(lines))}</pre>"
        _write(self.path, html.replace(charset, refresh, 1).replace(header, running, 1))

    def add(self, line: str) -> None:
        """Write the page with one more line; with new results if the device's records have changed since."""
        files = (self.results / folder / f"{self.slug}.json" for folder in (".", "bench", "models"))
        seen = [path.stat().st_mtime_ns for path in files if path.exists()]
        self._lines = [*self._lines[1 - SHOWN_LINES :], line]
        self.show(self._lines, seen != self._seen)
        self._seen = seen


def write_comparison(
    before: str | Path, after: str | Path, reports_dir: str | Path, say: Callable[[str], object] = lambda line: None
) -> Path:
    """Write a page that compares two bench records (files, or results folders with one each); returns its path.

    say: is told the verdict, in lines. Raises ReportError for anything else.
    """
    from autotune.report.compare import build_comparison, compare, load_record, verdict_lines

    comparison = compare(load_record(Path(before)), load_record(Path(after)))
    page = build_comparison(comparison)
    for line in verdict_lines(comparison):
        say(line)
    return _publish(Path(reports_dir), page)


def write_certificate(record: Mapping[str, Any], reports_dir: str | Path) -> Path:
    """Write the page of a certificate's record; returns its path."""
    from autotune.report.certificate import build_certificate, page_name

    return _publish(Path(reports_dir), build_certificate(record, page_name(record)))


def summary_table(results_dir: str | Path, device: str | None = None) -> str:
    """The published entries as plain text, one table per device; see :mod:`autotune.report.terminal`."""
    from autotune.report import terminal

    return terminal.summary_table(results_dir, device)


def _publish(folder: Path, page: Page) -> Path:
    """Write what stands beside a page, then the page, then remove sources that it no longer names; returns its path."""
    files = page.files()
    sources = folder / f"{page.name}.sources"
    for name, text in files.items():
        _write(folder / name, text)
    for path in sources.glob("*.js"):
        if f"{sources.name}/{path.name}" not in files:
            path.unlink()
    return folder / f"{page.name}.html"


def _write(path: Path, text: str) -> None:
    """Write a temporary file, then rename it: a reader never sees an incomplete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", text=True)
    try:
        with named_in_errors(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
