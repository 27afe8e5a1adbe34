"""The report as a reader meets it: generated pages enter a headless Chromium that sorts, filters, opens and prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from browser import CONTRAST, column, expect, heads, needs_chromium, open_all, show, table_of, unfolded
from report_samples import (
    DEVICE,
    HOST_KNOBS,
    KEY,
    SLUG,
    measured_row,
    replay,
    suite_row,
    write_replay,
    write_results,
    write_suite,
)

from autotune.database.maintenance import facts_of_record, source_text
from autotune.paths import results_dir
from autotune.report import write_reports
from autotune.workload.config import find_problem
from autotune.workload.known_kinds import kernel_kind
from kernelgen.kernels.product.schedule import schedule_from_dict

pytestmark = [needs_chromium, pytest.mark.slow]
# A4 landscape without its margins, in CSS pixels: 297 mm less twice 11 mm.
PAPER = {"width": 1039, "height": 710}
# What must be opened before a table is seen.
BENCH, TUNED = "Every row of the bench", ("The search", "Every tuned row")
CPU = "intel-xeon-processor-2-50ghz-2-cores"


def many_knobs(results: Path) -> None:
    """As many knobs as a GPU's schedules have: the widest tables of a page."""
    database = results / f"{SLUG}.json"
    data = json.loads(database.read_text())
    for entry in data["entries"]:
        for schedule in (entry["schedule"], entry["default"]["schedule"]):
            schedule |= {f"channels_per_thread_{n}": n + len(entry["direction"]) for n in range(8)}
            schedule |= {f"edge_operand_{n}": "shared" for n in range(3)}
    database.write_text(json.dumps(data))


def suite_rows() -> list[dict[str, Any]]:
    graphs = ("molecule", "carbon", "water", "protein")
    rows = [measured_row("mace-mp-large", graph, which) for graph in graphs for which in ("forward", "backward")]
    rows.append(measured_row("nequip-lips", "water", "forward", 3.0, dtype="float64"))
    failed = suite_row("nequip-lips", "molecule", "force_step")
    return [*rows, failed | {"times": failed["times"] | {"equitune": {"error": "LaunchError: <too many> registers"}}}]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section filled."""
    folder = write_results(tmp_path_factory.mktemp("results"), ("mace-made-up",), trials=20)
    many_knobs(folder)
    write_replay(write_suite(folder, suite_rows()), replay())
    (path,) = write_reports(folder, tmp_path_factory.mktemp("reports"))
    return path


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of what is stored of a CPU in ``results/``."""
    results = tmp_path_factory.mktemp("stored")
    for part in (f"{CPU}.json", f"bench/{CPU}.json", f"trials/{CPU}.jsonl.gz"):
        (results / part).parent.mkdir(exist_ok=True)
        shutil.copy(results_dir() / part, results / part)
    (path,) = write_reports(results, tmp_path_factory.mktemp("reports"))
    return path


@pytest.fixture(params=["made_up", "stored"])
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_no_error_and_no_request(visit: Any, path: Path) -> None:
    page = visit(path)
    assert page.title().startswith("Equitune on") and page.locator("h1").is_visible()
    open_all(page)


def test_a_click_sorts_by_number_and_what_is_absent_comes_last(visit: Any, made_up: Path) -> None:
    page = visit(made_up)
    show(page, BENCH)
    table = table_of(page, BENCH)
    place = heads(table).index("Tuned")
    head = table.locator("thead th").nth(place)
    for direction in ("ascending", "descending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        values = table.evaluate(
            "(t, n) => [...t.tBodies].map(body => Number(body.rows[0].cells[n].dataset.value ?? NaN))", place
        )
        *numbers, last = values
        assert last != last and "failed" in column(table, place)[-1], "NaN: the row that failed"
        assert numbers == sorted(numbers, reverse=direction == "descending") and len(set(numbers)) > 4
    assert table.locator("th[aria-sort]").count() == 1
    open_all(page)
    labels = table.evaluate("t => [...t.tBodies].map(b => [b.rows[0].cells[0].textContent, b.rows[1].textContent])")
    assert all(label in below for label, below in labels), "what is below a row moves along with it"


def test_choices_are_kept_for_the_next_visit(visit: Any, made_up: Path) -> None:
    page = visit(made_up)
    select = page.locator(".picker select").first
    other = select.locator("option").last.inner_text()
    select.select_option(other)
    page.locator("table.sortable thead th button").nth(4).evaluate("button => button.click()")
    shown = page.locator("table.sortable tbody tr:first-child th").all_inner_texts()
    page.reload()
    assert page.locator(".picker select").first.input_value() == other
    assert page.locator(".picker .which").inner_text().startswith(other)
    assert page.locator("table.sortable tbody tr:first-child th").all_inner_texts() == shown
    assert page.locator("th[aria-sort]").count() == 1


def test_the_keyboard_sorts_too(visit: Any, made_up: Path) -> None:
    page = visit(made_up)
    show(page, *TUNED)
    table = table_of(page, "Tuned rows")
    place = heads(table).index("Direction")
    head = table.locator("thead th").nth(place)
    before = column(table, place)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and column(table, place) == sorted(before) != before
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending" and column(table, place) == sorted(before, reverse=True)


def test_words_and_choices_filter_rows(visit: Any, made_up: Path) -> None:
    page = visit(made_up)
    show(page, BENCH)
    table = table_of(page, BENCH)
    bar = page.locator(".filter", has=page.locator(f"input[aria-label='Filter: {BENCH}']"))
    total, shown = len(suite_rows()), bar.locator("output")
    assert shown.text_content() == f"{total} rows" and len(column(table, 0)) == total
    words = bar.locator("input")
    words.fill("LARGE water")
    assert column(table, 0) == ["mace-mp-large"] * 2 and shown.text_content() == f"2 of {total} rows"
    words.fill("no such row")
    assert column(table, 0) == [] and shown.text_content() == f"0 of {total} rows"
    words.fill("")
    assert bar.locator("select").evaluate_all("all => all.map(s => s.options[0].text)") == [
        *("Graph: all", "dtype: all", "Pass: all"),
    ]
    for name, value, number in (("Pass", "forward", 5), ("Graph", "water", 2), ("dtype", "float64", 1)):
        bar.locator(f"select[aria-label^='{name}']").select_option(value)
        assert column(table, heads(table).index(name)) == [value] * number
    assert column(table, 0) == ["nequip-lips"]


def test_every_figure_has_a_text(visit: Any, path: Path) -> None:
    page = visit(path)
    open_all(page)
    drawings = page.evaluate(
        """[...document.querySelectorAll("svg, img, canvas, figure > :not(figcaption)")].map(drawn =>
            [drawn.getAttribute("role"), drawn.getAttribute("aria-label") ?? drawn.getAttribute("alt") ?? ""])"""
    )
    assert len(drawings) >= 9
    for role, text in drawings:
        assert role == "img" and len(text) > 40 and any(letter.isdigit() for letter in text), text


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(visit: Any, path: Path, scheme: str) -> None:
    page = visit(path, color_scheme=scheme)
    open_all(page)
    seen, ground, poor = page.evaluate(CONTRAST)
    assert seen > 300 and (min(ground[:3]) > 200 if scheme == "light" else max(ground[:3]) < 60)
    assert poor == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_never_scrolls_sideways(visit: Any, path: Path, width: int) -> None:
    page = visit(path, width)
    for opened in (False, True):
        if opened:
            open_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        beyond = page.evaluate(
            """width => [...document.querySelectorAll("body *")].filter(element => element.checkVisibility()
                && !element.closest(".scroll *, pre *, svg *") && element.getBoundingClientRect().right > width + .5)
                .map(element => element.outerHTML.slice(0, 80))""",
            width,
        )
        assert beyond == []
        boxes = page.evaluate(
            """[...document.querySelectorAll(".scroll, pre")].filter(box => box.checkVisibility()
                && box.scrollWidth > box.clientWidth).map(box => { box.scrollLeft = 1e6; return box.scrollLeft; })"""
        )
        assert all(moved > 0 for moved in boxes) and (boxes or width > 400), "what is wide scrolls inside its own box"


def test_no_column_is_cut_off_on_a_usual_screen(visit: Any, path: Path) -> None:
    page = visit(path, 1400)
    page.evaluate("for (const part of document.querySelectorAll('details.fold')) part.open = true")
    expect(page.locator("details[open] > [data-part]")).to_have_count(0)
    wide = "found => found.filter(s => s.scrollWidth > s.clientWidth + 1).map(s => s.ariaLabel)"
    assert page.locator(".scroll").evaluate_all(wide) == []


def test_paper_shows_all_that_is_open(visit: Any, path: Path) -> None:
    page = visit(path, viewport=PAPER)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator(".filter, nav, .screen").evaluate_all("all => all.some(e => e.checkVisibility())") is False
    closed = page.locator("summary").evaluate_all("all => all.filter(summary => summary.checkVisibility()).length")
    assert closed == 0, "what is closed leaves no line behind"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    # Chromium takes minutes to print all that can be opened.
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF-")
    open_all(page)
    clipped = page.evaluate(
        """width => [...document.querySelectorAll("table, pre, svg, p, dl, li")].filter(element => {
            const box = element.getBoundingClientRect();
            return element.checkVisibility() && (box.right > width + 1 || element.scrollWidth > element.clientWidth + 1
              && getComputedStyle(element).overflowX !== "visible" || getComputedStyle(element).maxHeight !== "none");
          }).map(element => `${element.getBoundingClientRect().right} ${element.outerHTML.slice(0, 120)}`)""",
        PAPER["width"],
    )
    assert clipped == []


def test_a_row_opens_to_schedule_source_and_samples(visit: Any, made_up: Path) -> None:
    page = visit(made_up)
    show(page, BENCH)
    table = table_of(page, BENCH)
    body = table.locator(":scope > tbody", has_text="mace-mp-large").first
    body.locator("summary", has_text="raw samples, source").first.click()
    unfolded(page)
    assert body.locator("caption", has_text="Tuned schedules").is_visible()

    record = next(row for row in suite_rows() if row["label"] == "mace-mp-large" and row["pass"] == "forward")
    body.locator("summary", has_text="Source, forward").click()
    code = body.locator("pre code")
    unfolded(page)
    kernel = (find_problem(KEY), "conv", "forward", "float32", record["layout"], facts_of_record(DEVICE))
    assert code.text_content() == source_text(kernel_kind("conv").spec(*kernel), schedule_from_dict(HOST_KNOBS))

    body.locator("summary", has_text="Raw samples: 100").click()
    strip = body.locator("svg.strips")
    assert strip.is_visible() and "tuned 20 samples, median" in (strip.get_attribute("aria-label") or "")
    dots = strip.evaluate("svg => [...svg.querySelectorAll('.dots')].map(path => path.getTotalLength() >= 0"
                          " && path.getAttribute('d').split('M').length - 1)")  # fmt: skip
    assert sum(dots) == 100, "a dot a sample"
    body.locator("summary", has_text="The numbers").click()
    shown = body.locator(".numbers dd").first.text_content() or ""
    assert [float(number) for number in shown.split(", ")] == record["times"]["equitune"]["samples_us"]


def test_a_tuned_row_opens_too(visit: Any, stored: Path) -> None:
    page = visit(stored)
    show(page, *TUNED)
    body = table_of(page, "Tuned rows").locator(":scope > tbody").first
    caption = body.locator("caption", has_text="Schedule:")
    assert caption.count() == 0
    body.locator("summary").first.click()
    unfolded(page)
    assert caption.count() == 1 and caption.is_visible()


def test_without_scripts_every_number_is_there_and_no_dead_control(visit: Any, made_up: Path) -> None:
    page = visit(made_up, java_script_enabled=False)
    assert page.locator("input, select").count() == 0
    assert page.locator("tbody tr:not(.below) .best").count() >= len(suite_rows()) - 1
    assert SLUG in page.content()
