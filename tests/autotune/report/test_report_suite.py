"""The report's suite and replayed searches: made-up rows and replays enter, their figures and pages are checked."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from report_samples import (
    SLUG,
    Page,
    page_of,
    replay,
    sampled,
    suite_row,
    timed,
    write,
    write_replay,
    write_results,
    write_suite,
)

from autotune.bench.rows import SuiteRow
from autotune.report.devices import load_device
from autotune.report.kernels import kernels, prices
from autotune.report.render import environment
from autotune.report.sources import Sources
from autotune.report.tuning import Trials, sampler_name, trials_of
from autotune.text import floored_ratio

NEW_KEYS = ("deterministic", "memory", "host_us", "schedules", "origins", "resources", "errors")
PEERS = ("cuequivariance", "openequivariance", "e3nn")


def losing() -> dict[str, Any]:
    return suite_row("mace <big> & slow", "water", "backward", 0.93, memory={"equitune": 9e6, "cuequivariance": 5e6})


def failing() -> dict[str, Any]:
    row = suite_row("nequip-lips", "molecule", "force_step")
    return row | {"times": row["times"] | {"equitune": {"error": "LaunchError: <too many> registers"}}}


def alone() -> dict[str, Any]:
    """A row on which no peer ran."""
    row = suite_row("sevennet-l3i5", "protein", "forward", operation="plain")
    return row | {"times": row["times"] | {name: {"error": f"{name} <crashed>"} for name in PEERS}}


def deterministic() -> list[dict[str, Any]]:
    normal = suite_row("mace-mp-large", "carbon", "forward", 2.7)
    slow = timed(normal["times"]["equitune"]["time_us"] * 1.25)
    return [normal, normal | {"deterministic": True, "times": normal["times"] | {"equitune": slow}}]


def rows() -> list[dict[str, Any]]:
    others = [suite_row("mace-mp-large", graph, "backward", 1.8) for graph in ("molecule", "carbon")]
    double = suite_row("nequip-lips", "water", "force_step", 4.0, dtype="float64") | {"joules": {"equitune": 0.0123}}
    return [losing(), failing(), alone(), double, *others, *deterministic()]


def words_of(page: Page) -> str:
    return re.sub(r"\s+", " ", " ".join(page.words))


def lines_of(markup: str) -> dict[str, list[str]]:
    """ "Kind, pass" -> the texts of the other cells of each line of a table."""
    found = {}
    for line in markup.split("<tbody>")[1].split("<tr>")[1:]:
        first, second, *cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)
        found[f"{first}, {second}"] = cells
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = write_suite(write_results(tmp_path_factory.mktemp("results"), ("mace-made-up",), trials=20), rows())
    return page_of(write_replay(folder, replay()), tmp_path_factory.mktemp("reports"))


def test_page_with_a_suite_is_sound(page: Page) -> None:
    assert page.loaded == [] and page.unlabelled == 0
    assert len(page.ids) == len(set(page.ids)) and page.targets <= set(page.ids)
    assert page.counts["caption"] == page.counts["table"]
    assert page.text.count('<tr class="below">') == len(rows()) + 3
    assert page.counts["details"] == page.counts["summary"] >= len(rows()) + 3
    assert not {"nan", "none", "null", "inf"} & {words.strip().lower() for words in page.words}
    drawings = re.findall(r"<svg.*?</svg>", page.text, flags=re.S)
    assert not re.search(r"#[0-9a-f]{6}", "".join(drawings)), "a colour that does not follow the scheme"
    (dots,) = [svg for svg in drawings if "Dot plot" in svg]
    assert "backward, float32 3 rows from 0.93× to 1.80×" in dots and "1 below 1" in dots


def test_text_of_records_is_escaped(page: Page) -> None:
    text = words_of(page)
    for words in ("mace <big> & slow", "LaunchError: <too many> registers", "RuntimeError: <aot> & no double backward"):
        assert words in text
    assert not re.search(r"<(big|too many|aot|crashed|1o)>", page.text)


def test_every_row_shows_its_numbers(page: Page) -> None:
    shown = {float(value) for value in page.values if re.fullmatch(r"[\d.e+-]+", value)}
    for record in rows():
        row = SuiteRow(record)
        for value in (row.time_us, row.default_us, row.peer_us, row.ratio, row.floor_us / row.time_us):
            assert math.isnan(value) or value in shown
        for name, time_us in row.times.items():
            assert math.isnan(time_us) or time_us in shown, name
    text = words_of(page)
    for words in ("158,000 edges, 1,000 nodes", "168 / 177 / 186", "0 / 16 / 32 B", "forward, out, path 3 <1o>",
                  "default 2", "exact", "OpenEquivariance 33.0 µs", "no spills", "exceeds 5.00 MB",
                  "a copy of as many bytes takes 876 µs", "12.3 mJ"):  # fmt: skip
        assert words in text.replace("\N{NO-BREAK SPACE}", " "), words


def test_rows_that_lose_are_told_first_and_marked(page: Page) -> None:
    text = words_of(page)
    assert "Slower than the fastest peer: 2 of 8 rows" in text
    assert "mace <big> & slow on water, float32, ir_mul, conv, backward: 0.93× as fast as cuEquivariance" in text
    assert "nequip-lips on molecule, float32, ir_mul, conv, force step: failed: LaunchError" in text
    assert page.text.count('<tbody class="lost">') == 2
    assert text.index("failed: LaunchError") < text.index("0.93× as fast") < text.index("Every row of the bench")


def test_no_loss_is_said_too(tmp_path: Path) -> None:
    text = words_of(page_of(write_suite(tmp_path / "results", deterministic()), tmp_path / "reports"))
    assert "No row is slower than its fastest peer." in text and "Slower than the fastest peer" not in text


def test_what_a_row_says_of_itself() -> None:
    lost, failed, lonely, double = (SuiteRow(record) for record in rows()[:4])
    assert lost.peer == "cuequivariance" and lost.loses and lost.exceeds_memory
    assert lost.ratio == pytest.approx(0.93) and lost.over_floor == pytest.approx(1.5, rel=1e-3)
    assert math.isnan(failed.ratio) and failed.loses and "too many" in failed.reason("equitune")
    assert lonely.peer is None and not lonely.loses and math.isnan(lonely.ratio) and lonely.group == "plain products"
    assert double.group == "float64 convolutions" and not double.exceeds_memory and not double.loses
    assert double.default_ratio == pytest.approx(1.3)


@pytest.mark.parametrize("worst", [math.nan, None, {"error": None, "block": "path 7"}, [math.nan, "path 7"]])
def test_an_error_that_is_no_number_is_the_worst(worst: Any) -> None:
    row = suite_row("a", "carbon", "backward")
    assert (found := SuiteRow(row).accuracy()) is not None and (found.error, found.place) == (4.4e-7, "backward, w")
    row["errors"]["equitune"]["backward"] = {"x": 3e-7, "y": worst, "w": 1e-7}
    found = SuiteRow(row).accuracy()
    assert found is not None and math.isnan(found.error) and found.place.startswith("backward, y")


def test_one_table_holds_the_means_and_counts() -> None:
    section = kernels([SuiteRow(record) for record in rows()], Sources())
    tables: Any = environment().get_template("kernels_tables.html").module
    lines = lines_of(str(tables.means(section)))
    # Rows, speed-up, least, slower, the same two untuned, default, floor, memory, more memory, deterministic / normal.
    mean, memory = (0.93 * 1.8 * 1.8) ** (1 / 3), (9 / 5 * 0.8 * 0.8) ** (1 / 3)
    untuned = [f"{mean / 1.3:.2f}×", "0.71×"]
    shown = [f"{mean:.2f}×", "0.93×", "1", *untuned, "1.30×", "1.50×", f"{memory:.2f}×", "1", "\N{EN DASH}"]
    assert lines["Float32 convolutions, backward"] == ["3", *shown]
    assert lines["Float32 convolutions, forward"][:3] == ["1", "2.70×", "2.70×"], "a deterministic row is not in a mean"
    assert lines["Float32 convolutions, deterministic, forward"][0] == "1"
    assert lines["Float32 convolutions, deterministic, forward"][-1] == "1.25×"
    assert lines["Float32 convolutions, force step"][:4] == ["0 of 1", "\N{EN DASH}", "\N{EN DASH}", "1"], "it failed"
    assert lines["Plain products, forward"][:4] == ["0 of 1", *["\N{EN DASH}"] * 3], "no peer ran"
    assert lines["Float64 convolutions, force step"][1] == "4.00×"


def test_peers_without_a_time_are_named_with_the_reason(tmp_path: Path) -> None:
    """A peer that another row of the kind has, and this one has not, was not measured there."""
    rows = [suite_row(label, "carbon", "forward") for label in "abc"]
    del rows[0]["times"]["openequivariance"]
    rows[1]["times"]["openequivariance"] = {"error": "PeerError: openequivariance: on fire. See its log 17"}
    absent = kernels([SuiteRow(row) for row in rows], Sources())["absent"]
    assert absent == [
        ("e3nn-compiled", "RuntimeError: <aot> & no double backward", 3),
        ("openequivariance", "not measured there", 1),
        ("openequivariance", "on fire", 1),
    ]
    text = words_of(page_of(write_suite(tmp_path / "results", rows), tmp_path / "reports"))
    assert "OpenEquivariance: not measured there (1 row)" in text and "no double backward (3 rows)" in text


def test_price_of_determinism() -> None:
    pair = [SuiteRow(record) for record in deterministic()]
    ((normal, row, price),) = prices(reversed(pair))
    assert (normal, row) == (pair[0], pair[1]) and price == pytest.approx(1.25, rel=1e-3)
    other = SuiteRow(deterministic()[1] | {"dtype": "float64"})
    assert prices([pair[0], other]) == []


def test_deterministic_rows_stand_beside_the_normal_ones(page: Page) -> None:
    text = words_of(page)
    assert "Cost of bitwise reproducible results" in text and "1.25× the normal" in text
    table = page.text.split("Every row of the bench</caption>")[1]
    operations = re.findall(r'data-value="conv (True|False)"', table)
    assert operations.count("True") == 1
    (place,) = [n for n, value in enumerate(operations) if value == "True"]
    labels = re.findall(r'<th scope="row" data-value="([^"]*)"', table)
    assert labels[place] == labels[place - 1] == "mace-mp-large"


def test_ratios_never_read_better_than_they_are() -> None:
    assert [floored_ratio(value) for value in (0.9999, 1.0, 1.0499, 1.05, 2.5, 34.2)] == [
        *("0.99×", "1.00×", "1.04×", "1.05×", "2.50×", "34×"),
    ]
    assert floored_ratio(math.nan) == "\N{EN DASH}"


def test_rows_without_the_newer_keys(tmp_path: Path) -> None:
    old = [{key: value for key, value in record.items() if key not in NEW_KEYS} for record in rows()[:6]]
    page = page_of(write_suite(tmp_path / "results", old), tmp_path / "reports")
    text = words_of(page)
    assert page.text.count('<tr class="below">') == 6 and "Every row of the bench" in text and "0.93×" in text
    for absent in ("Registers", "Host time fastest", "Tuned schedules", "Cost of bitwise", "not a number"):
        assert absent not in text, absent


def test_rows_with_holes(tmp_path: Path) -> None:
    bare = {"label": "bare", "pass": "forward"}
    holes: dict[str, Any] = dict.fromkeys(("floor_us", "graph", "host_us", "origins"))
    holes |= {"memory": {"equitune": None}, "schedules": {"equitune": None}, "errors": {"equitune": {"forward": None}}}
    holes |= {"resources": {"equitune": {"forward": {"code_bytes": 5}}}, "times": {"equitune": None, "e3nn": timed(3)}}
    odd = suite_row("odd", "carbon", "forward") | holes
    page = page_of(write_suite(tmp_path / "results", [bare, odd]), tmp_path / "reports")
    assert page.text.count('<tr class="below">') == 2 and "code bytes" in words_of(page)
    assert not {"nan", "none", "null"} & {words.strip().lower() for words in page.words}


def test_rerun_commands_name_the_suite(page: Page) -> None:
    assert "equitune bench suite --device cpu" in page.text


def test_replay_table_and_curves(page: Page) -> None:
    text = words_of(page)
    assert "No replay is stored" not in text
    table = page.text.split("Trials until within 5% of the best</caption>")[1].split("</table>")[0]
    heads = re.findall(r'<th scope="col" class="n">([^<]*)<small>trials', table)
    assert heads == ["TPE", "GP", "random", "default order"]
    per_seed = replay()["samplers"]["tpe"]["trials_to"]["0.05"]
    assert f'data-value="{float(sorted(per_seed)[2])}"' in table and "to never, 4 of 5 seeds" in table
    for words in (
        "640",
        "1.44×",
        "mace-made-up \N{MIDDLE DOT} double backward",
        "carbon, float32, ir_mul",
        "fastest 1.37×",
    ):
        assert words in table, words
    (drawing,) = [svg for svg in re.findall(r"<svg.*?</svg>", page.text, flags=re.S) if "Line chart" in svg]
    assert "TPE 1.00 times after 400 trials" in drawing


def test_what_starting_points_save(page: Page) -> None:
    table = page.text.split("Trials saved by starting from winners of other kernels</caption>")[-1].split("</table>")[0]
    table = table if "other problems" in table else page.text.split("winners saves</caption>")[1].split("</table>")[0]
    per_seed = sorted(replay()["samplers"]["tpe"]["trials_to"]["0.05"])
    assert "other problems" in table and 'data-value="9"' in table.replace('data-value="9.0"', 'data-value="9"')
    assert f">{per_seed[2] - 9}<" in table


def test_the_gain_over_default_and_peer_has_an_interval(tmp_path: Path) -> None:
    row = suite_row("mace-mp-large", "carbon", "forward")
    times = {name: sampled(time["time_us"], seed, 60) if "time_us" in time else time
             for seed, (name, time) in enumerate(row["times"].items())}  # fmt: skip
    page = page_of(write_suite(tmp_path / "results", [row | {"times": times}]), tmp_path / "reports")
    found = re.findall(r"(\d\.\d{3}) to (\d\.\d{3}) at 95%", page.text)
    intervals = [(float(low), float(high)) for low, high in found]
    assert len(intervals) == 2, "the default and the fastest peer"
    assert all(low <= ratio <= high for (low, high), ratio in zip(sorted(intervals), (1.3, 2.0), strict=True))


def test_trials_to_the_best() -> None:
    assert trials_of([30, 10, 20]) == Trials("20", 20.0, "10\N{EN DASH}30, 3 seeds")
    assert trials_of([5, 5]) == Trials("5", 5.0, "5, 2 seeds")
    assert trials_of([1, 4]) == Trials("2.5", 2.5, "1\N{EN DASH}4, 2 seeds")
    never = trials_of([7, None, None])
    assert never.text == "not reached" and math.isnan(never.median) and never.spread == "7 to never, 1 of 3 seeds"
    assert trials_of([None]).spread == "never, 0 of 1 seeds"
    assert trials_of(None).text == "\N{EN DASH}"
    assert [sampler_name(key) for key in ("tpe", "default_order", "default", "mine")] == [
        *("TPE", "default order", "default order", "mine"),
    ]


def test_replays_without_curves_or_samplers(tmp_path: Path) -> None:
    folder = write_suite(tmp_path / "results", rows()[:1])
    assert "No replay is stored" in words_of(page_of(folder, tmp_path / "reports"))
    write_replay(folder, {"record": "x", "samplers": {}}, "empty")
    write_replay(folder, {"samplers": {"tpe": {"trials_to": {"0.1": [3]}}, "<b>": {"curve": [None, 2.0]}}}, "holes")
    page = page_of(folder, tmp_path / "reports")
    text = words_of(page)
    assert "holes" in text and "empty" not in text and "<b>" in text and "<b>" not in page.text


def test_a_replay_belongs_to_the_device_it_names(tmp_path: Path) -> None:
    folder = write_replay(write_suite(tmp_path / "results", rows()[:1]), replay() | {"device": f"{SLUG}-b"})
    write(folder / f"{SLUG}-b.json", {"device": {"name": "the other", "slug": f"{SLUG}-b"}, "entries": []})
    assert load_device(folder, SLUG).replays == {} and set(load_device(folder, f"{SLUG}-b").replays) == {"forward"}
