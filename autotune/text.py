"""Format numbers and names for people: microseconds, ratios and keys as short text.

Progress lines in the terminal use it too, so it imports nothing slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TUNED, DEFAULT = "equitune", "equitune-default"
# Of whole models: the package's own path without any accelerator.
STOCK = "stock"
# Also of whole models: the package's conversion to cuEquivariance, in which Equitune's convolution replaces its own.
JOINT = "equitune+cuequivariance"
# Of whole models: steps of energies and forces as one launch each.
CAPTURED = "equitune-captured"
# In the measurement of the largest crystal: edge weights never whole in memory.
STREAMED = "equitune-streamed"
# Of whole models: edge weights formed in registers, inside the convolutions.
FUSED = "equitune-fused"
# Of whole models: products in TF32. Contenders that a user chooses for their class have no part in other comparisons.
TF32 = "equitune-tf32"
NAMES = {
    TUNED: "tuned",
    DEFAULT: "untuned default",
    "e3nn": "e3nn",
    "e3nn-compiled": "e3nn compiled",
    "cuequivariance": "cuEquivariance",
    "cuequivariance-naive": "cuEquivariance (naive)",
    "openequivariance": "OpenEquivariance",
    "openequivariance-deterministic": "OEQ deterministic",
    "cuequivariance+openequivariance": "cuEquivariance and OpenEquivariance",
    JOINT: "Equitune with cuEquivariance",
    CAPTURED: "Equitune, captured",
    STREAMED: "Equitune, edge weights streamed",
    FUSED: "Equitune, edge weights fused",
    TF32: "Equitune in TF32",
    # Of radial convolutions: other forms of the layer, all with Equitune's convolution.
    "product-ieee": "weights in memory, torch's float32",
    "product-tf32": "weights in memory, torch's TF32",
    "product-fp16x3": "weights in memory, Equitune's product",
    "streamed": "weights streamed",
    "symmetrix": "Symmetrix-XL",
    "triton": "Allegro's Triton form",
    "mace": "MACE",
}
# Of whole models, after a path's name and a hyphen: how it runs, if not eagerly.
FORMS = {"captured": "captured", "compiled": "compiled", "aotinductor": "AOTInductor"}
MISSING = "\N{EN DASH}"


def path_and_form(key: str) -> tuple[str, str]:
    """``cuequivariance``, ``captured``; the form is empty for one that runs eagerly."""
    path, _, form = key.rpartition("-")
    return (path, form) if form in FORMS else (key, "")


def contender_name(key: str) -> str:
    """A contender's name in a sentence."""
    path, form = path_and_form(key)
    return NAMES[key] if key in NAMES else f"{NAMES.get(path, path)}, {FORMS[form]}" if form else key


def path_name(key: str) -> str:
    """A way to run a whole model, in a sentence."""
    return "Equitune" if key == TUNED else contender_name(key)


def is_ours(key: str) -> bool:
    """Whether Equitune takes part in a contender, alone or inside another library's model."""
    return path_and_form(key)[0].partition("+")[0] in (TUNED, DEFAULT, STREAMED, FUSED, TF32)


def precision_of(key: str, dtype: str) -> str:
    """The class of errors that a contender of whole models has: ``tf32``, or its dtype."""
    return "tf32" if path_and_form(key)[0] == TF32 else dtype


def kind_text(operation: object, deterministic: object) -> str:
    """How a kernel differs from a normal convolution: ``plain``, ``deterministic``, both or nothing."""
    plain = "" if operation in ("conv", None) else str(operation)
    return ", ".join(filter(None, (plain, "deterministic" if deterministic is True else "")))


def entry_note(entry: dict[str, Any]) -> str:
    """``carbon, deterministic, float32, ir_mul``: details of a database entry beside its label and direction."""
    graph = (entry.get("graph") or {}).get("name") or entry.get("graph_class")
    kind = kind_text(entry.get("operation"), entry.get("deterministic"))
    return ", ".join(filter(None, (str(graph), kind, str(entry.get("dtype")), str(entry.get("layout")))))


def direction_name(key: object) -> str:
    return str(key).replace("_", " ").replace("+", " + ")


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows"""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def count(value: float) -> str:
    """11,872"""
    return MISSING if math.isnan(value) else f"{value:,.0f}"


def significant(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else MISSING
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def _in_unit(value: float, scales: Mapping[str, float], space: str = "\N{NO-BREAK SPACE}") -> str:
    """In the unit with the fewest digits, of ``scales`` from the largest to the smallest; whole numbers of bytes."""
    if math.isnan(value):
        return MISSING
    unit = next((name for name, scale in scales.items() if value >= scale), list(scales)[-1])
    return f"{f'{value:.0f}' if unit == 'B' else significant(value / scales[unit])}{space}{unit}"


def time_text(time_us: float) -> str:
    """9.12 ms"""
    return _in_unit(time_us, {"s": 1e6, "ms": 1e3, "µs": 1.0})


def ratio_text(value: float) -> str:
    """34×, 1.41×, 0.80×: no decimals from ten on, two below."""
    if value >= 10:
        return f"{value:,.0f}×"
    return MISSING if math.isnan(value) else f"{value:.2f}×" if value >= 0.1 else f"{significant(value, 2)}×"


def interval_text(gain: Mapping[str, float]) -> str:
    """1.15x (1.12 to 1.18): a ratio, never without its interval."""
    return f"{gain['ratio']:.2f}x ({gain['low']:.2f} to {gain['high']:.2f})"


def floored_ratio(value: float) -> str:
    """``ratio_text`` rounded down, so that a ratio is never overstated: 0.999 is 0.99×."""
    return ratio_text(math.floor(value * 100 + 1e-9) / 100) if 0.1 <= value < 10 else ratio_text(value)


def binary_text(value: float) -> str:
    """9.54 GiB: bytes in binary units, as devices' memory is given."""
    return _in_unit(value, {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0})


def error_text(value: float) -> str:
    """3.1e-7: a small number in its shortest form."""
    if math.isnan(value):
        return "not a number"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def bytes_text(value: float) -> str:
    """Bytes in decimal units, as for bandwidths."""
    return _in_unit(value, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}, " ")


def joules_text(value: float) -> str:
    """1.23 mJ: energy of a call."""
    return _in_unit(value, {"J": 1.0, "mJ": 1e-3, "µJ": 1e-6}) if value > 0 else MISSING


def figures_text(record: Mapping[str, Any]) -> str:
    """12.3 µs and 1.23 mJ: what a trial or an entry has of a call."""
    texts = {"time_us": time_text, "joules": joules_text, "memory_bytes": bytes_text}
    return " and ".join(text(record[key]) for key, text in texts.items() if record.get(key))


# Share of what a GPU can do from which a kernel is said to wait for it.
WAITS_FOR = 60.0


def counters_text(resources: Mapping[str, Any], moved: float, time_us: float) -> str:
    """What ``ncu`` counted of a call, and what the kernel waits for; empty if nothing was counted.

    moved: bytes of its compulsory traffic.
    """
    known = {name: value for name, value in resources.items() if isinstance(value, int | float)}
    if "dram_read_bytes" not in known or "dram_write_bytes" not in known:
        return ""
    dram = known["dram_read_bytes"] + known["dram_write_bytes"]
    rate = 1e6 * dram / time_us
    shares = {"DRAM": "dram_percent", "tensor cores": "tensor_percent", "SMs": "sm_percent"}
    used = {what: known[name] for what, name in shares.items() if name in known}
    parts = [f"{bytes_text(dram)} of DRAM, {dram / moved:.2f} times the compulsory traffic, {bytes_text(rate)}/s"]
    parts += [f"{bytes_text(known['l2_bytes'])} of L2"] if "l2_bytes" in known else []
    parts += [f"{what} {share:.0f}% used" for what, share in used.items()]
    parts += [f"occupancy {known['occupancy_percent']:.0f}%"] if "occupancy_percent" in known else []
    busiest = max(used, key=lambda what: used[what], default="")
    if busiest and used[busiest] >= WAITS_FOR:
        return ", ".join([*parts, f"so it waits for {busiest}"])
    return ", ".join([*parts, "so it waits for none of them, but for latency or uneven work"])


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of the finite values; NaN if there is none."""
    logs = [math.log(value) for value in values if math.isfinite(value) and value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


@dataclass(frozen=True)
class TimeUnit:
    """One unit and number of decimals for a whole column, so that its digits align."""

    name: str
    scale: float
    decimals: int

    def text(self, time_us: float) -> str:
        return MISSING if math.isnan(time_us) else f"{time_us / self.scale:,.{self.decimals}f}"


def unit_for(times_us: Iterable[float]) -> TimeUnit:
    """The unit in which the smallest of the times still shows three digits, or nearly."""
    smallest = min((time for time in times_us if math.isfinite(time)), default=math.nan)
    if smallest < 100:
        return TimeUnit("µs", 1.0, 1)
    if smallest < 1000:
        return TimeUnit("µs", 1.0, 0)
    return TimeUnit("ms", 1e3, 2 if smallest < 1e4 else 1)


# How the reason begins that a contender has no time, if nothing was wrong with it.
NOT_COMPARED = "not compared"


def without_time(reason: str) -> str:
    """What a table says in place of a time."""
    return "left out" if reason.startswith(NOT_COMPARED) else "failed"
