"""What opens below a row: rows, schedules and raw samples enter; sources and strips are checked without a browser."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, shipped
from report_samples import (
    DEVICE,
    HOST_KNOBS,
    KEY,
    SLUG,
    Page,
    details_of,
    measured_row,
    page_of,
    sampled,
    source_of,
    suite_row,
    unfolded,
    write_results,
    write_suite,
)

from autotune.database.maintenance import facts_of_record, hash_of_text, source_text
from autotune.report import write_reports
from autotune.report.charts import axis_limit, strips
from autotune.report.render import Details, environment
from autotune.report.render import Page as Rendered
from autotune.report.sources import KernelSource, Sources, write_sources
from autotune.workload.config import find_problem
from autotune.workload.known_kinds import kernel_kind
from kernelgen.kernels.product.schedule import schedule_from_dict
from kernelgen.version import GENERATOR_VERSION

REPORTS, RESULTS = (ROOT / folder for folder in ("reports", "results"))
MOST_BYTES = 1_500_000
ROW = measured_row("a", "carbon", "forward")
SCHEDULES = ROW["schedules"]["equitune"]


def shown(rows: dict, schedules: dict, device: dict = DEVICE) -> str:
    """What a row shows of its sources."""
    macros: Any = environment().get_template("macros.html").module
    return str(macros.sources(write_sources([(rows, schedules)], device).of(rows, schedules)))


def test_parts_and_sources_come_back(tmp_path: Path) -> None:
    parts = {"0": '</script> <!-- \N{MINUS SIGN} "quoted"', "rows-1": ""}
    page = Rendered("name", "<p>", parts, {"abc": "a\n</script>\n\n\\"})
    for name, text in page.files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert details_of(tmp_path / "name.html") == parts
    assert source_of(tmp_path / "name.html", "abc") == "a\n</script>\n\n\\"
    assert list(page.files())[-1] == "name.html", "what it needs is there before it"


def test_what_folds_within_a_fold_is_a_part_of_its_own() -> None:
    details = Details()
    outer = details.fold(lambda: f"<i>{details.fold(lambda: '<b>quoted</b>')}</i>")
    assert "quoted" not in outer + details.parts["0"]
    assert unfolded(outer, details.parts) == "<i><b>quoted</b></i>"


def test_a_source_that_no_row_has_any_more_is_removed(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    results = write_suite(tmp_path / "results", [ROW])
    (path,) = write_reports(results, reports)
    (source,) = (reports / f"{SLUG}.sources").iterdir()
    assert "// problem: " in source_of(path, source.stem)
    write_suite(results, [suite_row("a", "carbon", "forward")])
    write_reports(results, reports)
    assert not source.exists()


def test_the_source_is_what_the_generator_compiles() -> None:
    found = write_sources([(ROW, SCHEDULES), (ROW, SCHEDULES)], DEVICE)
    (source,) = found.by_kernel.values()
    assert isinstance(source, KernelSource) and "// problem: " in source.text
    kernel = (find_problem(KEY), "conv", "forward", "float32", ROW["layout"], facts_of_record(DEVICE))
    text = source_text(kernel_kind("conv").spec(*kernel), schedule_from_dict(HOST_KNOBS))
    assert source.hash == hash_of_text(text) == hash_of_text(source.text)
    assert found.texts == {source.hash: source.text}
    assert source.hash in shown(ROW, SCHEDULES) and f"{len(source.text.splitlines()):,} lines" in shown(ROW, SCHEDULES)


def test_another_generator_than_the_rows_is_told() -> None:
    other = f"written by generator {GENERATOR_VERSION}; measured with generator 0.2.0+0123456789"
    assert other in shown(ROW, SCHEDULES)
    assert "measured with" not in shown(ROW | {"generator": GENERATOR_VERSION}, SCHEDULES)


@pytest.mark.parametrize(
    ("row", "schedules", "device", "reason"),
    [
        (ROW, {"forward": HOST_KNOBS | {"path_groups": 7}}, DEVICE, "path_groups=7"),
        (ROW, {"forward": HOST_KNOBS | {"knob": 7}}, DEVICE, "knob"),
        (ROW, {"sideways": HOST_KNOBS}, DEVICE, "direction 'sideways' is not among"),
        (ROW, {"forward": None}, DEVICE, "which is not complete"),
        (ROW | {"problem": None}, SCHEDULES, DEVICE, "which is not complete"),
        (ROW | {"problem": "no such"}, SCHEDULES, DEVICE, "unknown problem"),
        (ROW | {"operation": "other"}, SCHEDULES, DEVICE, "operation is 'other'"),
        (ROW, SCHEDULES, {"name": "nameless"}, "device field backend is None"),
    ],
)
def test_a_source_that_cannot_be_written_says_why(row: dict, schedules: dict, device: dict, reason: str) -> None:
    text = html.unescape(shown(row, schedules, device))
    assert f"generator {GENERATOR_VERSION} cannot write it: " in text and reason in text and "<details" not in text
    assert write_sources([(row, schedules)], device).texts == {}


def test_rows_without_schedules_have_no_source() -> None:
    assert write_sources([(ROW, {})], DEVICE).of(ROW, {}) == [] == Sources().of(ROW, SCHEDULES)


def test_every_sample_is_a_dot_and_a_number() -> None:
    times = {"equitune": sampled(50.0)["samples_us"], "e3nn": [3.0] * 7}
    drawn = strips(times, "a row")
    assert drawn is not None and drawn.samples == 27
    assert [(len(lane.inside), len(lane.beyond)) for lane in drawn.lanes] == [(19, 1), (7, 0)]
    assert "e3nn 7 samples, median 3.00" in drawn.label and "from 3.00" in drawn.label
    macros: Any = environment().get_template("macros.html").module
    text = str(macros.samples(drawn))
    assert text.count("h0") == 27 and text.count("var(--fig-bad)") == 1, "the outlier is in another ink"
    numbers = re.findall(r"<dd>([^<]*)</dd>", text)
    assert [[float(number) for number in line.split(", ")] for line in numbers] == list(times.values())
    assert strips({"equitune": []}, "a row") is None


def test_a_lone_outlier_does_not_set_the_axis() -> None:
    lane = [0.001 * n for n in range(-10, 10)]
    assert axis_limit([[*lane, 5.0]]) == pytest.approx(0.011)
    assert axis_limit([[0.0, 0.0]]) == axis_limit([]) == 0.01
    assert axis_limit([lane, [0.2] * 5]) == pytest.approx(0.22)


def test_a_tuned_row_shows_the_samples_of_its_trial(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", ("mace-made-up",), trials=5)
    (entry, *_) = json.loads((results / f"{SLUG}.json").read_text())["entries"]
    trial = {"study": "s", "number": 9, "state": "ok", "schedule": entry["schedule"], "time_us": 7.5}
    with open(results / entry["trials"]["file"], "a") as file:
        file.write(json.dumps(trial | {"samples_us": [7.125, 7.5, 8.25]}) + "\n")
    page = page_of(results, tmp_path / "reports")
    assert "<dd>7.125, 7.5, 8.25</dd>" in page.text and page.text.count("Raw samples: 3") == 1
    assert page.text.count('class="samples"') == 1


def test_a_row_without_samples_has_no_strip(tmp_path: Path) -> None:
    assert "samples_us" not in json.dumps(suite_row("a", "carbon", "forward"))
    page = page_of(write_results(tmp_path / "results", ("mace-made-up",), trials=0), tmp_path / "reports")
    assert "Raw samples" not in page.text and "strips" not in page.text.split("</style>")[1]


def pages_of_kernels() -> list[Path]:
    """Shipped pages whose device has entries and bench rows; others show rows of whole models alone."""
    return [page for page in shipped(sorted(REPORTS.glob("*.html"))) if (RESULTS / f"{page.stem}.json").exists()]


@pytest.mark.parametrize("page", pages_of_kernels(), ids=lambda path: path.stem)
def test_a_shipped_page_is_small_and_shows_every_row_of_its_record(page: Path) -> None:
    assert page.stat().st_size < MOST_BYTES
    text = Page(page).text
    database = json.loads((RESULTS / f"{page.stem}.json").read_text())
    bench = json.loads((RESULTS / "bench" / page.name).with_suffix(".json").read_text())
    for caption, records in (("Tuned rows", database["entries"]), ("Every row of the bench", bench["rows"])):
        section = next(part for part in text.split("<section>") if f"<caption>{caption}" in part)
        assert section.count('<tr class="below">') == len(records) > 0
    given = [
        result["samples_us"] for row in bench["rows"] for result in row["times"].values() if "samples_us" in result
    ]
    listed = [line for line in re.findall(r"<dd>([^<]*)</dd>", text) if re.fullmatch(r"[\d.]+(, [\d.]+)+", line)]
    assert sum(map(len, given)) <= sum(line.count(",") + 1 for line in listed) and len(given) > 100
