"""Two bench records compared: made-up records enter; pairs, verdicts, refusals and the open page are checked."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from browser import CONTRAST, column, heads, needs_chromium, open_all, table_of
from report_samples import Page, measured_row, write_suite

from autotune.bench.rows import SuiteRow
from autotune.cli.commands import main
from autotune.errors import ReportError
from autotune.measure.timing import ratio_interval
from autotune.report import write_comparison
from autotune.report.compare import Comparison, compare, load_record, sentence

GRAPHS = ("molecule", "carbon", "water", "protein")
Rows = list[dict[str, Any]]


def timed_as(row: dict[str, Any], samples: list[float]) -> dict[str, Any]:
    """With other samples of the tuned kernel."""
    middle = sorted(samples)[len(samples) // 2]
    return row | {"times": row["times"] | {"equitune": {"time_us": middle, "samples_us": samples}}}


def sides() -> tuple[Rows, Rows]:
    """Row by row: faster, slower, level, unclear for its spread, one measurement, failed, too few samples, no samples;
    then a row on either side alone."""
    rows = [measured_row("mace-mp-large", graph, which) for graph in GRAPHS for which in ("forward", "backward")]
    steady = [100 + 0.01 * n for n in range(20)]
    noisy = [80 + 2 * n for n in range(20)]
    old = [steady, steady, steady, noisy, steady, steady, steady, steady]
    new = [[t / 1.2 for t in steady], [t * 1.1 for t in steady], [t * 1.005 for t in steady], [t + 1 for t in noisy],
           steady, steady, steady[:3], steady]  # fmt: skip
    before = [timed_as(row, samples) for row, samples in zip(rows, old, strict=True)]
    after = [timed_as(copy.deepcopy(row), samples) for row, samples in zip(rows, new, strict=True)]
    after[5]["times"]["equitune"] = {"error": "LaunchError: <too many> registers"}
    after[7]["times"]["equitune"].pop("samples_us")
    after[0]["schedules"]["equitune"] = {"forward": before[0]["schedules"]["equitune"]["forward"] | {"path_groups": 3}}
    after[0]["software"], after[0]["generator"] = {"torch": "2.14.0"}, "0.3.0+abcdef"
    before.append(measured_row("only <before>", "water", "forward", dtype="float64"))
    after.append(measured_row("mace-mp-large", "water", "forward", deterministic=True))
    return before, after


SAID = (
    ("faster", None), ("slower", None), ("level", None), ("unclear", None), ("level", "one measurement"),
    ("unclear", "no time after"), ("unclear", "too few samples"), ("unclear", "no raw samples after"),
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("records")
    before, after = sides()
    return write_suite(made / "before", before), write_suite(made / "after", after)


@pytest.fixture(scope="module")
def data(folders: tuple[Path, Path]) -> Comparison:
    return compare(*map(load_record, folders))


@pytest.fixture(scope="module")
def path(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(*folders, tmp_path_factory.mktemp("reports"))


def test_rows_pair_by_what_they_are_about_and_get_their_verdicts(data: Comparison) -> None:
    assert [(judged.verdict, judged.reason) for judged in data.ours] == list(SAID)
    assert [row.text("label") for row in data.only_before] == ["only <before>"]
    assert [row.deterministic for row in data.only_after] == [True]
    for pair, judged in zip(data.pairs, data.ours, strict=True):
        assert pair.before.kernel == pair.after.kernel
        assert judged.ratio == pytest.approx(pair.before.time_us / pair.after.time_us, nan_ok=True)
    first, judged = data.pairs[0], data.ours[0]
    assert judged.interval == ratio_interval(first.after.samples("equitune"), first.before.samples("equitune"))
    assert judged.interval[0] <= 1.2 <= judged.interval[1]
    assert "8 rows in both records, after against before: 1 faster, 1 slower, 2 level, 4 unclear" in sentence(data)
    assert sentence(data).endswith("1 row are in both records but were measured once.")


def test_the_order_of_rows_in_a_file_does_not_matter(tmp_path: Path, data: Comparison) -> None:
    before, after = sides()
    shuffled = compare(*(load_record(write_suite(tmp_path / name, rows))
                         for name, rows in (("a", before), ("b", after[::-1]))))  # fmt: skip
    assert str([pair.judged for pair in shuffled.pairs]) == str([pair.judged for pair in data.pairs])


def test_exchanged_records_exchange_faster_and_slower(folders: tuple[Path, Path]) -> None:
    exchanged = compare(*map(load_record, folders[::-1]))
    assert [judged.verdict for judged in exchanged.ours][:5] == ["slower", "faster", "level", "unclear", "level"]


def test_a_file_and_its_folders_are_the_same_record(folders: tuple[Path, Path]) -> None:
    (file,) = (folders[0] / "bench").iterdir()
    records = [load_record(given) for given in (folders[0], folders[0] / "bench", file)]
    assert len({record.path for record in records}) == 1 and len(records[0].rows) == 9


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    cases = [
        (tmp_path / "absent", None, "there is no such file or folder; expected a bench record"),
        (tmp_path, None, r"holds 0 bench records \(none\); name the one"),
        (bench / "a.json", "{", "not readable as JSON"),
        (bench / "a.json", "[]", "holds no list 'rows'"),
        (bench / "a.json", '{"rows": [{"times": {}}]}', "row 0 does not say what it is about"),
        (bench / "a.json", '{"rows": [3]}', "row 0 does not say what it is about"),
    ]
    for given, text, message in cases:
        if text is not None:
            given.write_text(text)
        with pytest.raises(ReportError, match=message):
            load_record(given)
    (bench / "b.json").write_text('{"rows": []}')
    with pytest.raises(ReportError, match=r"holds 2 bench records \(.*a.json, .*b.json\); name the one"):
        load_record(tmp_path)


def test_records_without_a_row_in_common_still_leave_a_page(tmp_path: Path) -> None:
    before, after = sides()
    folders = write_suite(tmp_path / "a", before[-1:]), write_suite(tmp_path / "b", after[-1:])
    page = Page(write_comparison(*folders, tmp_path / "reports"))
    assert "no row in common" in " ".join(page.words) and page.counts["section"] == 5


def test_the_page_is_sound_and_says_what_was_compared(path: Path) -> None:
    page = Page(path)
    text = " ".join(" ".join(page.words).split())
    assert path.name == "compare-made-up-cpu-2-cores.html" and page.loaded == [] and page.unlabelled == 0
    assert len(page.ids) == len(set(page.ids)) and page.targets <= set(page.ids)
    for words in ("95% percentile bootstrap", "2% from 1", "2,000 resamples", "0.3.0+abcdef", "2.14.0", "Made-up CPU",
                  "only <before>", "LaunchError: <too many> registers", "2001-02-03 04:05", "path_groups"):  # fmt: skip
        assert words in text or words in page.text, words
    assert "<before>" not in page.text and "<too" not in page.text
    assert not {"nan", "none", "inf", "null"} & {words.strip().lower() for words in page.words}


def test_two_devices_are_named_in_the_file_and_the_title(tmp_path: Path) -> None:
    before, after = sides()
    folders = write_suite(tmp_path / "a", before), write_suite(tmp_path / "b", after)
    (file,) = (folders[1] / "bench").iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"device": {"name": "Another GPU", "slug": "another-gpu", "backend": "cuda"}}))
    said: list[str] = []
    path = write_comparison(*folders, tmp_path / "reports", said.append)
    assert path.name == "compare-made-up-cpu-2-cores-another-gpu.html"
    text = path.read_text()
    assert "<h1>Made-up CPU 2 cores and Another GPU</h1>" in text
    assert "Another GPU against Made-up CPU 2 cores: 1 faster" in text and "no time on Another GPU" in text
    words = re.sub(r"<(style|script).*?</\1>|<[^>]*>|only &lt;before&gt;", " ", text, flags=re.DOTALL)
    assert "Only on Another GPU" in words
    assert not re.search(r"\b(before|after)\b", words, re.IGNORECASE), "devices have no order in time"
    assert said[0] == sentence(compare(*map(load_record, folders)))
    assert "peers, as a control: " in said[-1] and "mean ratio" in said[-1]


def test_the_command_prints_the_verdict(folders: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--compare", *map(str, folders), "--reports", str(tmp_path)])
    verdict, *passes, page = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Of 8 rows in both records, after against before: 1 faster, 1 slower")
    assert any(line.startswith("  forward: ") for line in passes) and page.startswith("report: ")


def test_equal_records_give_equal_bytes(folders: tuple[Path, Path], path: Path, tmp_path: Path) -> None:
    assert write_comparison(*folders, tmp_path).read_bytes() == path.read_bytes()


def test_samples_that_are_no_times_are_left_out() -> None:
    row = SuiteRow({"times": {"equitune": {"time_us": 1.0, "samples_us": [1.0, None, "x", 0, -1, math.inf, True, 2]}}})
    assert row.samples("equitune") == [1.0, 2.0] and row.samples("e3nn") == []


@needs_chromium
def test_a_reader_finds_the_rows_of_a_verdict(visit: Any, path: Path) -> None:
    page = visit(path)
    table = table_of(page, "Tuned kernels before and after")
    place = heads(table).index("Verdict")
    for name in ("faster", "slower", "level", "unclear"):
        page.locator("select[aria-label^='Verdict']").select_option(name)
        assert column(table, place) == [name] * [said for said, _ in SAID].count(name)
    page.locator("select[aria-label^='Verdict']").select_option("faster")
    body = table.locator(":scope > tbody:visible")
    body.locator("summary").click()
    body.locator("caption", has_text="knobs that changed").wait_for()  # details come from a file beside the page
    strip = body.locator("svg.strips")
    assert strip.is_visible() and "before 20 samples, median 100" in (strip.get_attribute("aria-label") or "")


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_the_comparison_is_readable_and_never_scrolls_sideways(visit: Any, path: Path, width: int, scheme: str) -> None:
    page = visit(path, width, color_scheme=scheme)
    open_all(page)
    seen, _, poor = page.evaluate(CONTRAST)
    assert seen > 200 and poor == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").evaluate_all("all => all.every(svg => (svg.ariaLabel ?? '').length > 40)")
