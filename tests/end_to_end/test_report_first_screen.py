"""The first screen in a browser: made-up rows enter, a reader picks, scrolls wide tables and opens what is folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import needs_chromium, show, table_of, unfolded
from model_samples import all_rows, write_models
from report_samples import measured_row, suite_row, write_results, write_suite

from autotune.report import write_reports

pytestmark = [needs_chromium, pytest.mark.slow]
GRAPHS = ("molecule", "carbon", "water", "protein")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of kernels, on more graphs for one problem than for the other."""
    rows = [measured_row("mace-mp-large", graph, which) for graph in GRAPHS for which in ("forward", "force_step")]
    rows += [suite_row("nequip-lips", "water", "forward", 3.0, dtype="float64")]
    folder = write_suite(write_results(tmp_path_factory.mktemp("results"), ("mace-made-up",), trials=5), rows)
    (path,) = write_reports(folder, tmp_path_factory.mktemp("reports"))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(write_suite(tmp_path_factory.mktemp("results"), [suite_row("a", "water", "forward")]))
    (path,) = write_reports(folder, tmp_path_factory.mktemp("reports"))
    return path


def lines(page: Any) -> list[str]:
    """The bars of the first picker, a text each."""
    return page.evaluate(
        """() => [...document.querySelector(".picker").querySelectorAll(".bars > li:not(.barhead)")]
            .map(line => line.innerText.replace(/\\s+/g, " ").trim())"""
    )


def pick(page: Any, axis: str, value: str) -> None:
    page.locator(".picker").first.locator("label", has_text=axis).locator("select").select_option(value)
    unfolded(page)


def offered(page: Any, axis: str) -> list[str]:
    box = page.locator(".picker").first.locator("label", has_text=axis).locator("select")
    return box.evaluate("select => [...select.options].map(option => option.text)")


def test_a_reader_picks_model_structure_and_pass(visit: Any, models: Path) -> None:
    page = visit(models)
    page.locator(".controls").first.wait_for()
    assert [offered(page, axis) for axis in ("Model", "Structure", "Pass")] == [
        ["made-up-mace", "made-up-sevennet"],
        ["made-up-molecule", "made-up-liquid"],
        ["energies and forces", "training step"],
    ]
    for axis, value in (("Model", "made-up-mace"), ("Structure", "made-up-liquid"), ("Pass", "training step")):
        pick(page, axis, value)
    # 20 + 460,710 * 3e-4 milliseconds.
    ours, other, stock, default = lines(page)
    assert ours.startswith("Equitune tuned 158 ms") and other.startswith("cuEquivariance fastest other path 237 ms")
    assert "out of memory <on this device>" in stock and "198 ms" in default
    pick(page, "Model", "made-up-sevennet")
    assert lines(page)[2].startswith("SevenNet stock 1.90 s"), "structure and pass are kept"
    show(page, "Reproduce this row")
    pick(page, "Pass", "energies and forces")
    shown = page.locator(".picker pre").first
    assert shown.is_visible(), "what is open stays open"
    assert shown.inner_text() == all_rows()[6]["command"]
    assert "0.90×" in lines(page)[1] and page.locator(".times.slow").first.is_visible()


def test_later_choices_follow_earlier_ones(visit: Any, kernels: Path) -> None:
    page = visit(kernels)
    page.locator(".controls").wait_for()
    pick(page, "Problem", "mace-mp-large")
    pick(page, "Graph", "protein")
    assert offered(page, "Pass") == ["forward", "force step"]
    pick(page, "Problem", "nequip-lips")
    assert offered(page, "Graph") == ["water"] and offered(page, "Form") == ["convolution, float64, ir_mul"]
    graph = page.locator("label", has_text="Graph").locator("select")
    assert graph.is_disabled() and graph.input_value() == "water"
    assert "3.00×" in lines(page)[1]


def test_without_scripts_the_first_row_stands_there(visit: Any, models: Path) -> None:
    page = visit(models, java_script_enabled=False)
    assert page.locator("select, input").count() == 0
    first = page.locator(".picker").first
    assert first.locator(".which").inner_text().startswith("made-up-")
    assert first.locator(".bars .track i").count() == 4 and first.locator(".time", has_text="ms").count() == 4


@pytest.mark.parametrize(("width", "most"), [(1280, 800), (400, 900)])
@pytest.mark.parametrize("which", ["kernels", "models"])
def test_all_of_it_is_on_the_first_screen(
    visit: Any, request: pytest.FixtureRequest, which: str, width: int, most: int
) -> None:
    page = visit(request.getfixturevalue(which), width)
    page.locator(".controls").first.wait_for()
    box = page.locator(".picker").first.bounding_box()
    assert box is not None and box["y"] > 0 and box["y"] + box["height"] <= most
    assert page.locator(".lead").bounding_box()["y"] < box["y"]
    inside = page.evaluate(
        """() => [...document.querySelectorAll(".picker *")].filter(e => e.checkVisibility()
            && e.getBoundingClientRect().right > e.closest(".picker").getBoundingClientRect().right).length"""
    )
    assert inside == 0


def test_a_page_opens_short_and_its_links_open_what_is_folded(visit: Any, kernels: Path) -> None:
    page = visit(kernels)
    closed = page.evaluate("document.documentElement.scrollHeight")
    assert closed < 3000, "four screens"
    folded = page.locator("section > details.fold")
    assert folded.count() >= 4 and page.locator("section > details.fold[open]").count() == 0
    progress = page.locator("summary h3", has_text="Progress")
    assert not progress.is_visible()
    page.locator("nav a", has_text="The search").click()
    assert progress.is_visible()
    again = visit(kernels.with_name(kernels.name))
    again.evaluate("location.hash = '#provenance'")
    again.reload()
    assert again.locator("summary h2", has_text="Provenance").locator("xpath=../..").evaluate("part => part.open")


@pytest.mark.parametrize("width", [1280, 400])
def test_heads_of_rows_and_columns_stay_in_sight(visit: Any, kernels: Path, width: int) -> None:
    page = visit(kernels, width)
    show(page, "Every row of the bench")
    table = table_of(page, "Every row of the bench")
    moved = table.evaluate(
        """table => {
            const box = table.closest(".scroll");
            box.style.maxHeight = "320px";
            box.scrollTo(1e6, 1e6);
            const frame = box.getBoundingClientRect(), corner = table.tHead.rows[0].cells[0].getBoundingClientRect();
            const last = table.tBodies[table.tBodies.length - 1].rows[0].cells[0].getBoundingClientRect();
            const under = document.elementFromPoint(last.left + 8, last.top + last.height / 2).closest("th, td");
            return [box.scrollLeft, box.scrollTop, corner.left - frame.left, corner.top - frame.top,
                    last.left - frame.left, last.width / frame.width, under?.tagName];
        }"""
    )
    across, down, corner_left, corner_top, left, share, under = moved
    assert down > 100 and (across > 100 or width > 400)
    assert all(abs(offset) <= 2 for offset in (corner_left, corner_top, left))
    assert share < 0.5 and under == "TH", "it covers what scrolls below it and leaves room for it"


def test_hashes_stand_in_the_provenance_alone(visit: Any, kernels: Path) -> None:
    page = visit(kernels)
    generator = "0.2.0+0123456789"
    assert generator in page.locator("section", has=page.locator("#provenance")).text_content()
    assert generator not in page.locator("header").text_content()
