"""The table of the largest crystals on a page: a made-up record enters, its lines are checked."""

from __future__ import annotations

import html
import re
from pathlib import Path

from model_samples import all_rows, largest_row, write_models
from report_samples import page_of, write_suite


def plain(markup: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", markup))).replace("\N{NO-BREAK SPACE}", " ")


def test_the_largest_crystals_have_a_table_of_their_own(tmp_path: Path) -> None:
    folder = write_models(write_suite(tmp_path / "results", []), [*all_rows(), largest_row()])
    with_crystals = page_of(folder, tmp_path / "reports")
    page = with_crystals.text
    section = page.split('<h2 id="largest">')[1].split("</section>")[0]
    lines = [plain(line) for line in section.split("<tr>")[2:]]
    for line, words in zip(
        lines,
        (
            ("Equitune, edge weights streamed", "131,072 8.00×", "256 GiB", "262,144 atoms: time limit of 240 s"),
            ("Equitune", "32,768 2.00×", "5,177,344", "64.0 GiB", "512 ms", "65,536 atoms: out of memory"),
            ("cuEquivariance", "16,384 1.00×", "interrupted"),
            ("stock", "4,096 0.25×", "8,192 atoms: out of memory"),
            ("OpenEquivariance", "refuses <all>"),
        ),
        strict=True,
    ):
        for word in words:
            assert word in line, (word, line)
    assert "--model made-up-mace --largest" in plain(section)
    # They are no rows of times: nothing else of the page changes.
    without = page_of(write_models(folder, all_rows()), tmp_path / "reports")
    assert 'id="largest"' not in without.text
    assert with_crystals.choices("model-rows") == without.choices("model-rows")


def test_a_page_of_nothing_but_largest_crystals(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    page = page_of(write_models(tmp_path / "results", [largest_row()]), tmp_path / "reports")
    assert "Largest crystal that fits" in page.words and 'id="models"' not in page.text
