"""First half of the page: summary sentence, headline ratios and bars."""

from __future__ import annotations

import math

import pandas as pd

from autotune.report.data.device_data import PANELS, PASSES, DeviceData
from autotune.report.html import figures
from autotune.report.html.markup import Markup, join, tag
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    contender_name,
    count,
    direction_name,
    error_text,
    geometric_mean,
    kind_text,
    ratio_text,
    time_text,
)

HARMONICS = "harmonics"


def ratios(data: DeviceData, rows: pd.Index, contender: str) -> list[float]:
    """Speed-ups of the tuned kernel over ``contender``, for rows where both have a time."""
    wide = data.times[data.times["row"].isin(rows)].pivot_table(index="row", columns="contender", values="time_us")
    if TUNED not in wide or contender not in wide:
        return []
    return [float(ratio) for ratio in (wide[contender] / wide[TUNED]).dropna()]


def best_peer(data: DeviceData, row: int) -> tuple[str, float] | None:
    """The fastest peer of a row, and the tuned kernel's speed-up over it."""
    tuned = data.time(row, TUNED)
    peers = data.times[(data.times["row"] == row) & ~data.times["contender"].isin([TUNED, DEFAULT])]
    peers = peers[peers["time_us"].notna()]
    if tuned is None or math.isnan(tuned["time_us"]) or peers.empty:
        return None
    fastest = peers.loc[peers["time_us"].idxmin()]
    return str(fastest["contender"]), float(fastest["time_us"] / tuned["time_us"])


def _place(row: pd.Series) -> str:
    graph = f" on {row['graph']}" if row["graph"] else ""
    edges = "" if math.isnan(row["edges"]) else f" ({count(row['edges'])} edges)"
    return f"{row['label']}{graph}{edges}"


def headline_row(data: DeviceData) -> int | None:
    """The row of the summary sentence: a product, forward, float32; with most peers, then most traffic."""
    timed = data.times[(data.times["contender"] == TUNED) & data.times["time_us"].notna()]["row"]
    rows = data.rows[data.rows.index.isin(timed) & ~data.rows["deterministic"].astype(bool)]
    if rows.empty:
        return None
    peers = data.times[data.times["time_us"].notna()].groupby("row").size()

    def rank(row: int) -> tuple:
        record = rows.loc[row]
        traffic = 0.0 if math.isnan(record["bytes"]) else record["bytes"]
        kind = (record["operation"] != HARMONICS, record["direction"] == "forward", record["dtype"] == "float32")
        return (*kind, int(peers.get(row, 0)), record["source"] == "tuned", traffic, -row)

    return int(max(rows.index, key=rank))


def sentence(data: DeviceData) -> str:
    """The result of tuning for one row, in plain words."""
    row = headline_row(data)
    if row is None:
        return "No tuned time has been published for this device yet."
    record, tuned = data.rows.loc[row], data.time(row, TUNED)
    assert tuned is not None
    time_us = float(tuned["time_us"])
    names = [name for name in data.contenders(record["source"]) if name not in (TUNED, DEFAULT)]
    parts = []
    for name in [*names, DEFAULT]:
        found = data.time(row, name)
        if found is not None and not math.isnan(found["time_us"]):
            parts.append(f"{ratio_text(found['time_us'] / time_us)} as fast as {_article(name)}{contender_name(name)}")
    if not math.isnan(record["floor_us"]):
        parts.append(f"at {ratio_text(time_us / record['floor_us'])} the traffic floor")
    what = f"the tuned {direction_name(record['direction'])} takes {time_text(time_us)}"
    text = f"On this device, for {_place(record)}, {what}" + (": " + ", ".join(parts) if parts else "")
    if record["error_slot"]:
        text += f"; its largest relative error is {error_text(record['error'])}"
    return text + "."


def _article(name: str) -> str:
    return "the " if name == DEFAULT else ""


def cards(data: DeviceData) -> Markup:
    """Geometric means per direction, over the tuned rows, or over bench rows if more of these have peers."""
    shown = []
    for title, rows in _cases(data):
        lines = []
        for contender in _contenders(data, rows):
            values = ratios(data, rows, contender)
            over = "" if len(values) == len(rows) else f" ({len(values)} of {len(rows)})"
            lines.append((contender, contender_name(contender) + over, geometric_mean(values), values))
        if not len(rows) or not lines:
            continue
        best = [found[1] for row in rows if (found := best_peer(data, row))]
        big, over_what = (geometric_mean(best), "the best peer") if best else (lines[0][2], "the untuned default")
        listing = tag("dl", *(join((tag("dt", label), tag("dd", ratio_text(mean), data_value=mean)))
                              for _, label, mean, _ in lines))  # fmt: skip
        plural = "row" if len(rows) == 1 else "rows"
        head = tag("h3", title, " ", tag("small", f"{len(rows)} {plural}"))
        value = tag("span", ratio_text(big), class_="big", data_value=big)
        note = tag("span", f"as fast as {over_what}", class_="over")
        shown.append(tag("div", head, value, note, listing, class_="card"))
    if not shown:
        return tag("p", "No row has both a tuned time and one to compare it with.", class_="hint")
    hint = "Geometric means over rows where both have a time. Below 1 the tuned kernel is slower."
    return join((tag("p", hint, class_="hint"), tag("div", *shown, class_="cards")))


def _cases(data: DeviceData) -> list[tuple[str, pd.Index]]:
    """Heading and rows of each direction, for products and harmonics separately: a joint mean has no meaning."""
    found = [(direction_name(name).capitalize(), _rows_of(data, name, False)) for name in PASSES]
    return found + [(f"Harmonics, {direction_name(name)}", _rows_of(data, name, True)) for name in PASSES]


def _rows_of(data: DeviceData, name: str, harmonics: bool) -> pd.Index:
    rows = data.rows[(data.rows["direction"] == name) & ~data.rows["deterministic"].astype(bool)]
    rows = rows[(rows["operation"] == HARMONICS) == harmonics]
    tuned, other = rows[rows["source"] == "tuned"].index, rows[rows["source"] != "tuned"].index
    # Entries may have been tuned without peers; then bench rows have them.
    compared = data.times[~data.times["contender"].isin([TUNED, DEFAULT]) & data.times["time_us"].notna()]["row"]
    return tuned if len(tuned) and compared.isin(tuned).sum() >= compared.isin(other).sum() else other


def _contenders(data: DeviceData, rows: pd.Index) -> list[str]:
    """Default first, then peers, if they have a time in any of these rows."""
    known = data.times[data.times["row"].isin(rows) & data.times["time_us"].notna()]["contender"]
    if TUNED not in set(known):
        return []
    return [name for name in (DEFAULT,) if name in set(known)] + sorted(set(known) - {TUNED, DEFAULT})


def bars(data: DeviceData) -> Markup:
    """One panel per row, with a common time axis."""
    known = [row for _, rows in _cases(data) for row in rows if (data.times["row"] == row).any()]
    if not known:
        return tag("p", "No row has been tuned or benchmarked yet.", class_="hint")
    traffic = data.rows["bytes"].fillna(0.0)
    shown = sorted(known, key=lambda row: (-traffic[row], row))[:PANELS]
    times = data.times[data.times["row"].isin(shown)]["time_us"].dropna()
    ends = [float(time) for time in (*times, *data.rows.loc[shown, "floor_us"].dropna())]
    limits = (min(ends, default=1.0), max(ends, default=10.0))
    panels = []
    for row in sorted(shown):
        record = data.rows.loc[row]
        given = data.times[data.times["row"] == row].set_index("contender")
        names = [name for name in data.contenders(record["source"]) if name in given.index]
        bar_list = [figures.Bar(name, float(given.loc[name, "time_us"]), given.loc[name, "error"]) for name in names]
        what = f"{direction_name(record['direction'])}, {_place(record)}"
        drawing = figures.time_bars(bar_list, float(record["floor_us"]), limits, f"bars{row}", what)
        title = f"{record['label']} \N{MIDDLE DOT} {direction_name(record['direction'])}"
        panels.append(tag("figure", tag("figcaption", title, tag("small", _detail(record))), drawing))
    hint = "Medians. All panels share one logarithmic axis. Dashed: the traffic floor, the time to read all inputs and write all outputs once."  # noqa: E501
    if len(known) > len(shown):
        hint += f" The figure shows the {len(shown)} of {len(known)} rows with the most memory traffic."
    return join((tag("p", hint, class_="hint"), tag("div", *panels, class_="panels")))


def _detail(record: pd.Series) -> str:
    edges = "" if math.isnan(record["edges"]) else f", {count(record['edges'])} edges"
    kind = kind_text(record["operation"], record["deterministic"])
    parts = (f"{record['graph'] or record['graph_class'] or MISSING}{edges}", kind, record["dtype"], record["layout"])
    return ", ".join(str(part) for part in parts if part)
