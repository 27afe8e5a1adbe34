"""Made-up results of one device, and a parser of the pages that the report makes of them."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from autotune.report import write_reports

SLUG = "made-up-cpu-2-cores"
DEVICE = {"name": "Made-up CPU 2 cores", "slug": SLUG, "backend": "cpu", "arch": "x86_64", "units": 2,
          "vector_bytes": 64}  # fmt: skip
KEY = "uvu|8x0e+8x1o|1x0e+1x1o|8x0e+8x1o+8x1o|0.0.0,0.1.1,1.0.2|per-edge|component|element"
VOID = {"meta", "br", "col", "hr", "wbr"}
SCALE = {"forward": 1.0, "backward": 2.3, "double_backward": 4.1, "forward+backward": 3.2}


def timed(time_us: float, **more: Any) -> dict[str, Any]:
    return {"time_us": time_us, "q1_us": round(time_us * 0.985, 2), "q3_us": round(time_us * 1.02, 2), **more}


def sampled(time_us: float, seed: int = 0, count: int = 20) -> dict[str, Any]:
    """As ``timed``, with raw samples around the median; the last one is an outlier."""
    generator = random.Random(seed)
    samples = [round(time_us * generator.uniform(0.99, 1.01), 3) for _ in range(count - 1)]
    return timed(time_us, samples_us=[*samples, round(time_us * 1.3, 3)])


def schedule(generator: random.Random) -> dict[str, Any]:
    return {
        "backend": "cpu",
        "fuse": generator.random() < 0.7,
        "accumulate": generator.choice(["registers", "atomics"]),
        "path_groups": generator.choice([1, 2, 3, 5]),
        "edges_per_chunk": generator.choice([8, 16, 32, 64, 128]),
        "channel_block": generator.choice([8, 16, 32]),
        "threads": 0,
    }


def trial(number: int, study: str, scale: float, generator: random.Random) -> dict[str, Any]:
    knobs = schedule(generator)
    record: dict[str, Any] = {"study": study, "number": number, "schedule": knobs, "reason": None, "time_us": None}
    chance = generator.random()
    if chance < 0.12:
        reason = f"about {generator.randrange(300, 900)} registers a thread, 2.1 times the 255 there are"
        return record | {"state": "illegal", "reason": reason}
    if chance < 0.17:
        return record | {"state": "timeout", "reason": "no answer within 20 s"}
    if chance < 0.2:
        return record | {"state": "wrong", "reason": "out_w: relative error <nan> & above 1e-05"}
    slow = (1 if knobs["fuse"] else 3.5) * (1 if knobs["accumulate"] == "registers" else 1.6)
    slow *= 1 + abs(math.log2(knobs["channel_block"] / 16)) * 0.3
    return record | {"state": "ok", **timed(round(9000 * scale * slow * generator.uniform(1, 1.1), 3))}


def entry(label: str, direction: str, graph: dict[str, Any]) -> dict[str, Any]:
    generator, scale = random.Random(label + direction), SCALE[direction] * graph["edges"] / 11872
    tuned = round(9123.456 * scale, 3)
    return {
        "label": label, "problem": KEY, "operation": "conv", "direction": direction, "dtype": "float32",
        "layout": "mul_ir", "graph_class": "conv-e14-d5", "graph": graph,
        "schedule": schedule(generator) | {"channel_block": 32}, **timed(tuned),
        "default": {"schedule": schedule(generator) | {"channel_block": 16}, **timed(tuned * 1.41)},
        "peers": {
            "e3nn": timed(tuned * 34.2), "e3nn-compiled": {"error": "no <C++> compiler was found"},
            "cuequivariance-naive": timed(tuned * 12.3),
        },
        "errors": {"g": 3.1e-7} if direction == "forward" else {"x": 2e-7, "y": 4.4e-7, "w": 1e-7},
        "tolerance": 1e-5, "bytes": 52_000_000, "copy_bandwidth": 1.2e10, "floor_us": round(tuned / 2.11, 3),
        "resources": {"code_bytes": 18432, "vector_bytes": 64}, "generator": "0.1.0+0123456789",
        "software": {"python": "3.11.2", "torch": "2.13.0", "e3nn": "0.6.0"}, "date": "2001-02-03T04:05:06+00:00",
        "trials": {"file": f"trials/{SLUG}/{label}-{direction}.jsonl", "count": 60, "ok": 48, "sampler": "tpe"},
        "source": "feedc0dedeadbeef",
        "certificate": {"bitwise": True, "equivariance": 5.2e-7, "edges": 768, "environment": "cafe0123456789ab"},
        "gain": {"ratio": 1.41, "low": 1.387, "high": 1.432, "level": 0.95} if direction == "forward" else {},
    }  # fmt: skip


def write_results(folder: Path, labels: tuple[str, ...] = ("mace-made-up", "nequip-made-up"), trials: int = 60) -> Path:
    """A results folder of one device with entries, a bench and trials."""
    graph = {"name": "mof", "edges": 11872, "nodes": 424}
    entries = [entry(label, name, graph) for label in labels for name in ("forward", "backward", "double_backward")]
    rows = []
    for label in labels:
        record = entry(label, "forward+backward", graph)
        times = {"equitune": timed(record["time_us"]), "equitune-default": timed(record["default"]["time_us"])}
        kept = {key: record[key] for key in ("label", "problem", "operation", "graph", "graph_class", "dtype", "layout",
                                             "bytes", "floor_us", "date", "software", "generator")}  # fmt: skip
        rows.append({**kept, "pass": "forward+backward", "times": {**times, **record["peers"]}})
    (folder / "bench").mkdir(parents=True)
    (folder / "trials" / SLUG).mkdir(parents=True)
    write(folder / f"{SLUG}.json", {"schema": 1, "device": DEVICE, "entries": entries})
    write(folder / "bench" / f"{SLUG}.json", {"schema": 1, "device": DEVICE, "rows": rows})
    for record in entries:
        generator = random.Random(record["label"])
        lines = [json.dumps(trial(n, "s", SCALE[record["direction"]], generator)) for n in range(trials)]
        (folder / record["trials"]["file"]).write_text("\n".join(lines) + "\n")
    return folder


def write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def details_of(path: Path) -> dict[str, str]:
    """What opens on a page on demand, by id."""
    return handed_over(path.with_name(f"{path.stem}.details.js"), "details")[0]


def source_of(path: Path, name: str) -> str:
    """A source of a page, by its hash."""
    hash, lines = handed_over(path.with_name(f"{path.stem}.sources") / f"{name}.js", "source")
    assert hash == name
    return "\n".join(lines)


def handed_over(path: Path, function: str) -> list[Any]:
    """The arguments with which a file beside a page calls a function of it."""
    text = path.read_text(encoding="utf-8") if path.exists() else f"{function}({{}});\n"
    assert text.startswith(f"{function}(") and text.endswith(");\n")
    return json.loads(f"[{text[len(function) + 1 : -3]}]")


def unfolded(text: str, parts: dict[str, str]) -> str:
    """HTML with everything open except sources."""
    place, count = re.compile(r'<p class="hint" data-part="(\d+)">[^<]*</p>'), 1
    while count:
        text, count = place.subn(lambda match: parts[match[1]], text)
    return text


class Page(HTMLParser):
    """Balance, ids, references, loaded addresses and the records' numbers of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        parts = details_of(path)
        text = unfolded(path.read_text(encoding="utf-8"), parts)
        self.parts = parts
        self.text, self.open, self.words = text, [], []  # type: ignore[var-annotated]
        self.counts: Counter[str] = Counter()
        self.ids: list[str] = []
        self.targets: set[str] = set(re.findall(r"url\(#([^)]+)\)", text))
        self.loaded: list[str] = []
        self.values: list[str] = []
        self.unlabelled = 0
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(name, attributes)
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.counts[name] += 1
        self.ids += [given["id"] or ""] if "id" in given else []
        self.values += [given["data-value"] or ""] if "data-value" in given else []
        for key in ("src", "href", "data", "srcset", "action"):
            address = given.get(key) or ""
            if address.startswith("#"):
                self.targets.add(address[1:])
            elif address:
                self.loaded.append(address)
        self.unlabelled += name == "svg" and not given.get("aria-label")
        self.unlabelled += name == "th" and given.get("scope") not in ("row", "col")

    def handle_endtag(self, name: str) -> None:
        assert self.open and self.open[-1] == name, f"</{name}> closes {self.open[-1:]}"
        self.open.pop()

    def choices(self, name: str) -> dict[str, Any]:
        """What a reader can pick: the names of the axes, the place of the first row, and the keys and HTML of each."""
        found = re.search(rf'<script type="application/json" id="{name}">([^<]*)</script>', self.text)
        assert found is not None, name
        data = json.loads(found[1])
        return data | {"rows": [[*keys, self.parts[f"{name}-{n}"]] for n, keys in enumerate(data["rows"])]}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(results: Path, reports: Path) -> Page:
    (path,) = write_reports(results, reports)
    return Page(path)


GRAPHS = {
    "molecule": (306, 21),
    "carbon": (158_000, 1000),
    "water": (460_710, 5184),
    "protein": (55_770, 1502),
}
SUITE_DIRECTIONS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "force_step": ("forward", "edge_backward", "joint_backward"),
}


def suite_row(label: str, graph: str, which: str, ratio: float = 2.0, **changes: Any) -> dict[str, Any]:
    """A bench row with every key; ``ratio``: how many times as fast as the fastest peer (cuEquivariance) it is."""
    edges, nodes = GRAPHS[graph]
    tuned = round(edges * 0.01 * len(SUITE_DIRECTIONS[which]) + 9.5, 3)
    knobs = {"backend": "cuda", "accumulate": "registers", "path_groups": 2, "block_size": 64, "fuse": True}
    directions = SUITE_DIRECTIONS[which]
    error = {"out": {"error": 3.1e-7, "block": "path 3 <1o>"}} if which == "forward" else {"x": 2.5e-7, "w": 4.4e-7}
    memory = {"equitune": 4_000_000, "equitune-default": 4_000_000, "cuequivariance": 5_000_000, "e3nn": 900_000_000}
    row = {
        "label": label, "problem": KEY, "operation": "conv", "dtype": "float32", "layout": "ir_mul",
        "graph": {"name": graph, "edges": edges, "nodes": nodes}, "graph_class": f"conv-{graph}", "pass": which,
        "deterministic": False, "bytes": edges * 1000, "floor_us": round(tuned / 1.5, 3), "copy_us": 876.5,
        "times": {
            "equitune": timed(tuned), "equitune-default": timed(tuned * 1.3), "e3nn": timed(tuned * 70),
            "cuequivariance": timed(tuned * ratio), "openequivariance": timed(tuned * (ratio + 1.5)),
            "e3nn-compiled": {"error": "RuntimeError: <aot> & no double backward"},
        },
        "memory": memory, "host_us": {"equitune": 11.0, "openequivariance": 33.0} if edges <= 4096 else {},
        "schedules": {
            "equitune": {name: knobs | {"path_groups": 5} for name in directions},
            "equitune-default": dict.fromkeys(directions, knobs),
        },
        "origins": dict.fromkeys(directions, "exact"),
        "resources": {
            name: {part: {"registers": 168 + 9 * n, "spill_bytes": 16 * n, "shared_bytes": 2048}
                   for n, part in enumerate(directions)}
            for name in ("equitune", "equitune-default")
        },
        "errors": {"equitune": dict.fromkeys(directions, error)},
        "date": "2001-02-03T04:05:06+00:00", "software": {"torch": "2.13.0"}, "generator": "0.2.0+0123456789",
    }  # fmt: skip
    return row | changes


HOST_KNOBS = {"backend": "cpu", "fuse": True, "accumulate": "registers", "path_groups": 1, "channel_block": 8}


def measured_row(label: str, graph: str, which: str, scale: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A bench row with raw samples and a schedule of the made-up device, whose source can be written."""
    row = suite_row(label, graph, which)
    times = {
        name: sampled(round(given["time_us"] * scale, 3), seed) if "time_us" in given else given
        for seed, (name, given) in enumerate(row["times"].items())
    }
    directions = [name for name in SUITE_DIRECTIONS[which]]
    schedules = {"equitune": {name: HOST_KNOBS for name in directions}}
    return row | {"times": times, "schedules": schedules} | changes


def write_suite(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A results folder that holds only a bench."""
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    write(folder / "bench" / f"{SLUG}.json", {"schema": 1, "device": DEVICE, "rows": rows})
    return folder


def replay(seeds: int = 5) -> dict[str, Any]:
    """The replay of four samplers on one record."""
    generator = random.Random(0)
    samplers = {}
    for name, speed in (("default", 0.01), ("tpe", 0.06), ("gp", 0.05), ("random", 0.02)):
        to = {"0.05": [round(3 / speed) + generator.randrange(30) for _ in range(seeds)], "0.1": [20] * seeds}
        curve = [1 + 2.5 * math.exp(-speed * k) for k in range(400)]
        samplers[name] = {"trials_to": to, "curve": curve}
    samplers["random"]["trials_to"]["0.05"][0] = None
    return {
        "record": "mace-made-up-conv-forward", "label": "mace-made-up", "direction": "double_backward", "device": SLUG,
        "graph": {"name": "carbon"}, "dtype": "float32", "layout": "ir_mul", "trials": 400, "space_size": 640,
        "best_us": 449.0, "default_us": 650.0, "pruning": {"skipped": 41, "fastest_skipped": 1.37},
        "samplers": samplers,
        "transfer": {"sampler": "tpe", "from": {
            "other problems": {"starts": 3, "trials_to": {"0.05": [9] * seeds}, "curve": [1.0]},
        }},
    }  # fmt: skip


def write_replay(folder: Path, record: dict[str, Any], name: str = "forward") -> Path:
    (folder / "replay").mkdir(parents=True, exist_ok=True)
    write(folder / "replay" / f"{name}.json", record)
    return folder
