"""What opens below a row: rows, schedules and raw samples enter; sources and strips are checked without a browser."""

from __future__ import annotations

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
    measured_row,
    page_of,
    sampled,
    suite_row,
    unfolded,
    unpacked,
    write_results,
)

from autotune.database.maintenance import facts_of_record, hash_of_text, source_text
from autotune.report.charts import axis_limit, samples, strips
from autotune.report.markup import folded, join, tag, unfolding
from autotune.report.sources import KernelSource, Sources, pack, write_sources
from autotune.workload.config import find_problem
from kernelgen.kernels.product.schedule import schedule_from_dict
from kernelgen.version import GENERATOR_VERSION

REPORTS, RESULTS = (ROOT / folder for folder in ("reports", "results"))
MOST_BYTES = 3_000_000
ROW = measured_row("a", "carbon", "forward")
SCHEDULES = ROW["schedules"]["equitune"]


def texts_of(data: dict[str, Any]) -> dict[str, str]:
    """What the page's script makes of the sources' block."""
    written: list[str] = []
    new, texts = iter(data["lines"]), {}
    for name, pairs in data["copies"].items():
        start = len(written)
        for back, count in zip(pairs[::2], pairs[1::2], strict=True):
            for _ in range(count):
                written.append(written[-back] if back else next(new))
        texts[name] = "\n".join(written[start:])
    assert next(new, None) is None
    return texts


def test_packed_texts_come_back_and_common_lines_are_held_once() -> None:
    common = "".join(f"line {n} of the header, which all sources have\n" for n in range(500))
    texts = {str(n): f"// {n}\n{common}\n\nlast {n}" for n in range(20)} | {"empty": "", "same": "a\na\nb\na\n"}
    packed = pack(texts)
    assert texts_of(json.loads(json.dumps(packed))) == texts
    assert len(packed["lines"]) == 500 + 20 + 1 + 20 + 2, "each line once"
    assert len(packed["copies"]["7"]) == 2 * 3, "first line, the common ones, last line"


def test_folded_parts_come_back_and_nothing_in_a_block_ends_it() -> None:
    parts = [tag("p", f"{n} </script> <!-- \N{MINUS SIGN}", title="quoted") for n in range(300)]
    page = join(tag("details", folded(part)) for part in parts)
    visible, block = unfolding(page)
    assert block is not None and "quoted" not in visible + block and "<fold" not in visible
    assert not set("<") & set(re.sub("^<[^>]*>|</script>$", "", block)), "but for its own element"
    assert unfolded(visible + block) == page.replace("<fold>", "").replace("</fold>", "") + block
    assert unfolding(tag("p", "plain")) == ("<p>plain</p>", None) and folded(None) is None


def test_the_source_is_what_the_generator_compiles() -> None:
    found = write_sources([(ROW, SCHEDULES), (ROW, SCHEDULES)], DEVICE)
    (source,) = found.by_kernel.values()
    assert isinstance(source, KernelSource) and "// problem: " in source.text
    kernel = (find_problem(KEY), "conv", "forward", "float32", ROW["layout"], False, schedule_from_dict(HOST_KNOBS))
    assert source.hash == hash_of_text(source_text(*kernel, facts_of_record(DEVICE))) == hash_of_text(source.text)
    shown = found.of(ROW, SCHEDULES)
    assert found.written(ROW, SCHEDULES) and shown is not None and source.hash in shown
    packed = found.packed()
    assert packed is not None and texts_of(unpacked(packed, "sources")) == {source.hash: source.text}


def test_another_generator_than_the_rows_is_told() -> None:
    found = write_sources([(ROW, SCHEDULES)], DEVICE)
    other = found.of(ROW, SCHEDULES) or ""
    assert f"written by generator {GENERATOR_VERSION}; measured with generator 0.2.0+0123456789" in other
    same = found.of(ROW | {"generator": GENERATOR_VERSION}, SCHEDULES) or ""
    assert "the row was measured with" not in same


@pytest.mark.parametrize(
    ("row", "schedules", "device", "reason"),
    [
        (ROW, {"forward": HOST_KNOBS | {"path_groups": 7}}, DEVICE, "path_groups=7"),
        (ROW, {"forward": HOST_KNOBS | {"knob": 7}}, DEVICE, "knob"),
        (ROW, {"sideways": HOST_KNOBS}, DEVICE, "direction &#x27;sideways&#x27; is not among"),
        (ROW, {"forward": None}, DEVICE, "which is not complete"),
        (ROW | {"problem": None}, SCHEDULES, DEVICE, "which is not complete"),
        (ROW | {"problem": "no such"}, SCHEDULES, DEVICE, "unknown problem"),
        (ROW | {"operation": "other"}, SCHEDULES, DEVICE, "operation is &#x27;other&#x27;"),
        (ROW, SCHEDULES, {"name": "nameless"}, "device field backend is None"),
    ],
)
def test_a_source_that_cannot_be_written_says_why(row: dict, schedules: dict, device: dict, reason: str) -> None:
    found = write_sources([(row, schedules)], device)
    shown = found.of(row, schedules)
    assert shown is not None and f"generator {GENERATOR_VERSION} cannot write it: " in shown and reason in shown
    assert not found.written(row, schedules) and found.packed() is None and "<details" not in shown


def test_rows_without_schedules_have_no_source() -> None:
    assert write_sources([(ROW, {})], DEVICE).of(ROW, {}) is None
    assert Sources().of(ROW, SCHEDULES) is None


def test_every_sample_is_a_dot_and_a_number() -> None:
    given = {"equitune": sampled(50.0)["samples_us"], "e3nn": [3.0] * 7}
    drawn = strips(given, "a row")
    assert len(re.findall("h0", drawn)) == 27 and drawn.count("var(--fig-bad)") == 1, "the outlier is in another ink"
    assert "e3nn 7 samples, median 3.00" in drawn and "from 3.00" in drawn
    shown = samples(given, "a row") or ""
    numbers = re.findall(r"<dd>([^<]*)</dd>", shown)
    assert [[float(number) for number in line.split(", ")] for line in numbers] == list(given.values())
    assert samples({"equitune": []}, "a row") is None


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
    text = unfolded(page.read_text(encoding="utf-8"))
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
