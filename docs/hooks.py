"""What the documentation site takes from the repository: tables of the records in ``results/``, and the commands.

In: a page with a line ``<!-- table: NAME -->``, and the JSON files of ``results/``. Out: the page with that table in
the line's place. ``TABLES`` at the end of the file has all names. mkdocs calls ``on_files`` and ``on_page_markdown``.

README has such lines too, with the tables below them: ``python docs/hooks.py`` writes these anew.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from autotune.bench.dynamics import nanoseconds_a_day
from autotune.bench.largest import is_largest
from autotune.bench.rows import fastest_peer, geometric_mean, ratio
from autotune.text import CAPTURED, DEFAULT, STOCK, TUNED, is_ours

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- table: ([a-z0-9-]+) -->$", re.MULTILINE)
# The GPU and the CPU whose records the site shows.
GPU, GPU_MODELS, CPU_MODELS = "bench/nvidia-h200", "models/nvidia-h200", "models/intel-xeon-processor-2-cores"
LAMMPS = "lammps/nvidia-h200"
# Names for readers, in the order of the tables.
MODELS = {
    "mace-mp-0-small": "MACE-MP-0 small",
    "mace-mp-0-medium": "MACE-MP-0 medium",
    "mace-mp-0-large": "MACE-MP-0 large",
    "mace-mpa-0-medium": "MACE-MPA-0 medium",
    "mace-omat-0-small": "MACE-OMAT-0 small",
    "mace-omat-0-medium": "MACE-OMAT-0 medium",
    "mace-off23-small": "MACE-OFF23 small",
    "mace-off23-medium": "MACE-OFF23 medium",
    "mace-off23-large": "MACE-OFF23 large",
    "mace-off24-medium": "MACE-OFF24 medium",
    "mace-mh-1": "MACE-MH-1",
    "mace-omol-0": "MACE-OMOL-0",
    "sevennet-l3i5": "SevenNet-l3i5",
    "sevennet-0": "SevenNet-0",
    "checkpoint_l3i5.pth": "SevenNet-l3i5, trained",
    "checkpoint_sevennet_0.pth": "SevenNet-0, trained",
    "SevenNet-0, May": "SevenNet-0 of 22 May 2024, trained",
    "checkpoint_sevennet_mf_0.pth": "SevenNet-MF-0, trained",
    "sevennet-mf-ompa": "SevenNet-MF-ompa",
    "sevennet-omni-i12": "SevenNet-Omni-i12",
    "nequip-oam-s": "NequIP-OAM-S",
    "nequip-oam-m": "NequIP-OAM-M",
    "nequip-oam-l": "NequIP-OAM-L",
    "nequip-oam-xl": "NequIP-OAM-XL",
    "nequip-small": "NequIP, 64 features",
    "allegro-oam-l": "Allegro-OAM-L",
}
# Files of one name are told apart by the start of their SHA-256.
SAME_NAMES = {"5d389faf": "SevenNet-0, May"}
STRUCTURES = {
    "water-box": "water",
    "carbon": "diamond",
    "protein": "protein",
    "aspirin": "aspirin",
    "mof": "MOF-5",
}
ENERGY_FORCES, TRAINING, MD_STEP = "energy_forces", "training", "md_step"
PASSES = {ENERGY_FORCES: "energies and forces", TRAINING: "training"}
ABSENT = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers or short texts on the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def record(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def ratio_text(value: float) -> str:
    """Two decimals, rounded down, so that no gain is shown larger than it is."""
    return f"{math.floor(value * 100 + 1e-9) / 100:.2f}"


def time_text(milliseconds: float) -> str:
    """``1.21 ms``, ``37.4 ms``, ``178 ms``, ``1.11 s``."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s"
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f} ms"


# Whole models.


def model_rows(name: str) -> list[dict[str, Any]]:
    """Timed rows in the tables' order; those of the largest crystals are no times."""
    rows = [row for row in record(name)["rows"] if not is_largest(row)]
    place = {key: at for at, key in enumerate((*MODELS, *STRUCTURES, *PASSES, MD_STEP))}
    return sorted(rows, key=lambda row: (place[row["model"]], place[row["structure"]], place[row["pass"]]))


def times_of(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by contender, of those that ran."""
    return {name: cell["wall_ms"] for name, cell in row["contenders"].items() if cell.get("wall_ms")}


def fastest_other(row: dict[str, Any]) -> float | None:
    """Milliseconds of the fastest path that is neither ours nor stock."""
    return min((t for name, t in times_of(row).items() if not is_ours(name) and name != STOCK), default=None)


def model_gains() -> str:
    """By model and pass: the mean, and the least, of the fastest other path's time over ours, and of stock's."""
    lines = []
    rows = [row for row in model_rows(GPU_MODELS) if row["pass"] in PASSES]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for kind in PASSES:
            some = [row for row in rows if (row["model"], row["pass"]) == (model, kind)]
            others = [(fastest_other(row) or math.nan) / times_of(row)[TUNED] for row in some]
            stock = [times_of(row).get(STOCK, math.nan) / times_of(row)[TUNED] for row in some]
            cells += [mean_and_least(others), mean_and_least(stock)]
        lines.append([MODELS[model], *cells])
    head = [f"{name}: over {path}" for name in PASSES.values() for path in ("the fastest other path", "stock")]
    return table(["model", *head], lines)


def mean_and_least(ratios: Sequence[float]) -> str:
    """``6.70 (3.70)``; paths that ran out of memory, or were not measured, do not count."""
    known = [value for value in ratios if not math.isnan(value)]
    return f"{ratio_text(geometric_mean(known))} ({ratio_text(min(known))})" if known else ABSENT


def model_steps(name: str, kind: str) -> str:
    """Times of one pass: captured, eager, the fastest other path, stock."""
    lines = []
    for row in (row for row in model_rows(name) if row["pass"] == kind):
        cells = [row["contenders"].get(contender) for contender in (CAPTURED, TUNED)]
        shown = [cell_text(cell) for cell in cells]
        other = fastest_other(row)
        shown.append(time_text(other) if other else ABSENT)
        shown.append(cell_text(row["contenders"].get(STOCK)))
        place = f"{STRUCTURES[row['structure']]}, {row['atoms']:,} atoms"
        lines.append([f"{MODELS[row['model']]}, {place}", *shown])
    columns = ["model, structure", "Equitune, captured", "Equitune", "fastest other path", "stock"]
    kept = [0, *(at for at in range(1, 5) if any(line[at] != ABSENT for line in lines))]
    return table([columns[at] for at in kept], ([line[at] for at in kept] for line in lines))


def simulation_steps() -> str:
    """Times of a step of molecular dynamics, by who computes the model; Equitune's with nanoseconds a day."""
    others = {"cuequivariance": "cuEquivariance", "openequivariance": "OpenEquivariance", "symmetrix": "Symmetrix-XL"}
    lines = []
    for row in (row for row in model_rows(GPU_MODELS) if row["pass"] == MD_STEP):
        cells = row["contenders"]
        shown = [cell_text(cells.get(name)) for name in (TUNED, *others, STOCK)]
        place = f"{MODELS[row['model']]}, {STRUCTURES[row['structure']]}, {row['atoms']:,} atoms"
        lines.append([place, *shown, f"{nanoseconds_a_day(cells[TUNED]['wall_ms']):.1f}"])
    return table(["a step by ASE", "Equitune", *others.values(), STOCK, "ns a day with Equitune"], lines)


def lammps_steps() -> str:
    """Times of a step of LAMMPS by ranks, each of which has a GPU, and how far forces are from one process's."""
    lines = []
    for row in record(LAMMPS)["rows"]:
        name = f"{MODELS[row['model']]}, {STRUCTURES.get(row['structure'], row['structure'])}, {row['atoms']:,} atoms"
        lines.append([name, str(row["gpus"]), time_text(row["step_ms"]), f"{row['force_difference']:.1e}"])
    return table(["a step by LAMMPS", "GPUs", "Equitune", "largest difference of a force"], lines)


def cell_text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ABSENT
    if cell.get("wall_ms"):
        return time_text(cell["wall_ms"])
    return "out of memory" if cell.get("error") == "out of memory" else ABSENT


def memory_of_models() -> str:
    """Most memory of a step of energies and forces."""
    lines = []
    for row in (row for row in model_rows(GPU_MODELS) if row["pass"] == ENERGY_FORCES):
        held = {name: cell["peak_mib"] for name, cell in row["contenders"].items() if cell.get("peak_mib")}
        others = [size for name, size in held.items() if not is_ours(name) and name != STOCK]
        sizes = [held.get(TUNED), held.get(CAPTURED), min(others, default=None), held.get(STOCK)]
        name = f"{MODELS[row['model']]}, {STRUCTURES[row['structure']]}"
        lines.append([name, *(ABSENT if size is None else f"{size:,.0f}" for size in sizes)])
    return table(["MiB", "Equitune", "Equitune, captured", "leanest other path", "stock"], lines)


def largest_crystals() -> str:
    """Atoms of the largest diamond crystal that fitted."""
    rows = [row for row in record(GPU_MODELS)["rows"] if is_largest(row)]
    lines = []
    for row in sorted(rows, key=lambda row: list(MODELS).index(row["model"])):
        fitted = {name: cell["largest"]["atoms"] for name, cell in row["contenders"].items() if "largest" in cell}
        ours = max(atoms for name, atoms in fitted.items() if is_ours(name))
        others = max(atoms for name, atoms in fitted.items() if not is_ours(name))
        lines.append([MODELS[row["model"]], f"{ours:,}", f"{others:,}"])
    return table(["largest diamond crystal, atoms", "Equitune", "cuEquivariance"], lines)


# Certificates.

PEERS = {"cuequivariance": "cuEquivariance", "openequivariance": "OpenEquivariance"}


def certificates() -> list[dict[str, Any]]:
    """The newest last."""
    found = [json.loads(path.read_text()) for path in (ROOT / "results" / "certificates").glob("*.json")]
    return sorted(found, key=lambda one: one["made"])


def certified_name(one: dict[str, Any]) -> str:
    """The model of a certificate by its name in ``MODELS``."""
    model = one["model"]
    return SAME_NAMES.get(model.get("sha256", "")[:8], model["name"])


def certified_paths(name: str, is_gpu: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """By path and precision what the newest certificate says, with the names of its structures if these are given."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in certificates():
        if certified_name(one) == name and (one["device"]["backend"] != "cpu") == is_gpu:
            on = "" if "crystal" in one["structures"] else f" on {', '.join(one['structures'])}"
            found |= {(row["path"], row["dtype"]): row | {"on": on} for row in one["paths"]}
    return found


def verdict_cell(found: dict[tuple[str, str], dict[str, Any]], path: str, device: str) -> str:
    """``pass: 1.6e-12, 1.2e-03``, in float64 and float32; or why there is no such figure."""
    rows = [found[path, dtype] for dtype in ("float64", "float32") if (path, dtype) in found]
    if not rows:
        return f"not run on a {device}"
    worst = next((row for word in ("fail", "refused") for row in rows if row["verdict"] == word), None)
    if worst is not None:
        small = next((cell["smallest"] for cell in worst["checks"].values() if "smallest" in cell), None)
        at = f"; smallest: {small['formula']}, {small['atoms']} atoms" if small else ""
        return f"{worst['verdict']} in {worst['dtype']}: {worst['reason'][:160]}{at}".replace("|", "/").replace(
            "\n", " "
        )
    energies = ", ".join(f"{1e3 * row['differences']['energy']:.1e}" for row in rows)
    return f"pass: {energies}{rows[0]['on']}"


def stays_stock(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """What ``accelerate`` left as it was, and why; the rest of a note says what is replaced."""
    note = next((row["note"] for (path, _), row in found.items() if path == "equitune" and row["note"]), None)
    if note is None:
        return "not run"
    counts = [some == total for some, total in re.findall(r"(\d+) of (\d+)", note)]
    said = note.split("; stock: ", 1)
    return said[1] if len(said) == 2 else "nothing" if all(counts) else said[0]


def model_matrix() -> str:
    """Each model with its certificates, its gains on the GPU, and what stays stock."""
    lines = []
    timed = [row for row in model_rows(GPU_MODELS) if row["pass"] == ENERGY_FORCES]
    for name, shown in MODELS.items():
        cpu, gpu = certified_paths(name, is_gpu=False), certified_paths(name, is_gpu=True)
        cells = [verdict_cell(cpu, "equitune", "CPU"), verdict_cell(gpu, "equitune", "GPU")]
        cells.append(verdict_cell(gpu, CAPTURED, "GPU"))
        cells += [verdict_cell(gpu, peer, "GPU") for peer in PEERS]
        rows = [row for row in timed if row["model"] == name]
        for other in (lambda row: times_of(row).get(STOCK), fastest_other):
            ratios = [(other(row) or math.nan) / times_of(row)[TUNED] for row in rows]
            cells.append(mean_and_least(ratios) if any(not math.isnan(one) for one in ratios) else "not timed")
        lines.append([shown, *cells, stays_stock(gpu or cpu)])
    head = [
        "Equitune on a CPU",
        "on a GPU",
        "captured, on a GPU",
        *PEERS.values(),
        "over stock",
        "over the fastest other",
    ]
    return table(["model", *head, "stays stock"], lines)


# Kernels.

# The passes of a column.
COLUMNS = {
    "forward": ("forward",),
    "backward": ("backward", "edge_backward"),
    "force step": ("force_step", "double_backward"),
}
OPERATIONS = {
    "conv": "convolutions",
    "plain": "plain products",
    "harmonics": "spherical harmonics",
    "vectors": "convolutions of edge vectors",
    "contraction": "symmetric contractions",
}


def bench_rows() -> list[dict[str, Any]]:
    """Without fused radial convolutions: what those are compared with are other forms of ours."""
    return [row for row in record(GPU)["rows"] if row["operation"] != "radial"]


def kind_of(row: dict[str, Any]) -> str:
    name = "fully connected" if "uvw" in row["problem"] else OPERATIONS[row["operation"]]
    return f"{name}, {row['dtype']}" + ", deterministic" * row["deterministic"]


def untuned_ratio(row: dict[str, Any]) -> float | None:
    """The fastest peer's time over that of the rules' default."""
    default, value = row["times"].get(DEFAULT, {}), ratio(row)
    if value is None or "time_us" not in default:
        return None
    return value * row["times"][TUNED]["time_us"] / default["time_us"]


def kernel_gains(untuned: bool = False) -> str:
    """By kind of kernel: rows, and by pass the mean and the least of the fastest peer's time over ours."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in bench_rows():
        kinds.setdefault(kind_of(row), []).append(row)
    which, lines = untuned_ratio if untuned else ratio, []
    for kind, group in kinds.items():
        cells = []
        for column in COLUMNS.values():
            found = [which(row) for row in group if row["pass"] in column]
            cells.append(mean_and_least([math.nan if value is None else value for value in found]))
        lines.append([kind, str(len(group)), *cells])
    return table(["kernels", "rows", *COLUMNS], sorted(lines))


def level_rows() -> str:
    """Rows of tuned kernels that are slower than the fastest peer."""
    lines = []
    for row in bench_rows():
        value, peer = ratio(row), fastest_peer(row)
        if value is not None and value < 1:
            times = (row["times"][TUNED]["time_us"], row["times"][peer]["time_us"])
            name = f"{row['label']} on {row['graph']['name']}, {row['dtype']}, {row['pass']}"
            lines.append([name, *(f"{time:.2f} us" for time in times)])
    return table(["row", "Equitune", "fastest peer"], lines)


LAYERS = {
    "mace-mp-medium-radial": "MACE-MP-0 medium",
    "mace-mp-large-radial": "MACE-MP-0 large",
    "sevennet-l3i5-radial": "SevenNet-l3i5",
}


def fused_layers() -> str:
    """One layer on diamond: its time by where the weights of edges are formed, and the memory."""
    found = {(row["label"], row["pass"]): row for row in record(GPU)["rows"] if is_fused_layer(row)}
    lines = []
    for label, name in LAYERS.items():
        for kind, text in (("forward", "value"), ("backward", "gradients for forces")):
            times = found[label, kind]["times"]
            forms = (TUNED, "product-fp16x3", "product-ieee")
            lines.append([f"{name}, {text}", *(time_text(times[form]["time_us"] / 1e3) for form in forms)])
        memory = found[label, "forward+backward"]["memory"]
        sizes = [f"{memory[form] / 2**20:,.0f} MiB" for form in (TUNED, "product-fp16x3")]
        lines.append([f"{name}, memory of both", *sizes, ABSENT])
    return table(["layer", "in registers", "in memory, Equitune's product", "in memory, torch's product"], lines)


def is_fused_layer(row: dict[str, Any]) -> bool:
    return row["operation"] == "radial" and row["graph"]["name"] == "carbon"


# Schedules that were not tuned.


def untuned_choices() -> str:
    """Time over the tuned time, by way to choose, of problems that the model had not seen."""
    choices = record("replay/defaults-nvidia-h200")["choices"]
    names = {
        "rules": "default by rules",
        "model": "predicted",
        "first run": "what the first run keeps",
        "model, any trial": "the model's choice among measured trials",
    }
    lines = []
    for name, shown in names.items():
        found = choices[name]
        lines.append([shown, f"{found['mean']:.2f}", f"{found['worst']:.2f}", f"{found['measured']:.0%}"])
    return table(["choice", "mean, times the tuned time", "worst", "of these measured"], lines)


def drawn_problems() -> str:
    """The same of ten problems drawn at random, where everything was measured."""
    rows = record("drawn/compared/2028")["rows"]
    names = {"rules": "default by rules", "predicted": "predicted", "untuned": "what the first run keeps"}
    lines = []
    for name, shown in names.items():
        found = [row[name] / row["tuned"] for row in rows]
        lines.append([shown, f"{sum(found) / len(found):.2f}", f"{max(found):.2f}"])
    return table(["choice", "mean, times a search's", "worst"], lines)


def other_gpus() -> str:
    """Entries of the H200 within another GPU's limits, at the H200's times."""
    cards = {"sm_80": "A100", "sm_86": "A10", "sm_89": "L40S", "sm_100": "B200", "sm_120": "GeForce RTX 5090"}
    found = record("replay/defaults-nvidia-h200")["transfer"]
    lines = [[cards[arch], f"{found[arch]['tuned']:.2f}", f"{found[arch]['untuned']:.2f}"] for arch in sorted(found)]
    return table(["limits of", "shipped entries, times the best legal trial", "predicted schedules"], lines)


# The command line.


def commands() -> str:
    """Every command with its arguments, options and examples, as its ``--help`` has them."""
    from typer.main import get_command

    from autotune.cli.commands import app

    return "\n".join(_command_text(get_command(app), "equitune", depth=2))


def _command_text(command: Any, name: str, depth: int) -> list[str]:
    lines = [f"{'#' * depth} `{name}`", "", _prose(command.help or ""), ""]
    rows = [_option_row(one) for one in command.params if "--help" not in one.opts]
    if rows:
        lines += ["| argument or option | meaning |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), ""]
    examples = [line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("equitune ")]
    if examples:
        lines += ["```text", *examples, "```", ""]
    for child, found in getattr(command, "commands", {}).items():
        if not found.hidden:
            lines += _command_text(found, f"{name} {child}", min(depth + 1, 4))
    return lines


def _option_row(option: Any) -> tuple[str, str]:
    """Its names, and its help with choices and default."""
    if not option.opts[0].startswith("-"):
        return f"`{option.metavar or option.name.upper()}`", _prose(option.help)
    told = [_prose(option.help)] if option.help else []
    choices = [one for one in get_args(option.type_descriptor.annotation) if isinstance(one, str)]
    if choices:
        told.append("One of " + ", ".join(f"`{one}`" for one in choices) + ".")
    is_shown = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    told += [f"Default: `{option.default}`."] if is_shown else []
    names = ", ".join(f"`{text}`" for text in (*option.opts, *option.secondary_opts))
    return names, " ".join(told).replace("|", "\\|")


def _prose(text: str) -> str:
    """One paragraph, without Typer's marks."""
    return html.escape(" ".join(text.replace("\b", "").replace("\\[", "[").split()), quote=False)


TABLES = {
    "model-gains": model_gains,
    "simulation-steps": simulation_steps,
    "lammps-steps": lammps_steps,
    "gpu-energies": lambda: model_steps(GPU_MODELS, ENERGY_FORCES),
    "gpu-training": lambda: model_steps(GPU_MODELS, TRAINING),
    "cpu-energies": lambda: model_steps(CPU_MODELS, ENERGY_FORCES),
    "cpu-training": lambda: model_steps(CPU_MODELS, TRAINING),
    "memory": memory_of_models,
    "largest": largest_crystals,
    "matrix": model_matrix,
    "kernels": kernel_gains,
    "kernels-untuned": lambda: kernel_gains(untuned=True),
    "level": level_rows,
    "fused": fused_layers,
    "untuned": untuned_choices,
    "drawn": drawn_problems,
    "other-gpus": other_gpus,
    "commands": commands,
}


def filled(markdown: str) -> str:
    """A page with its tables; KeyError for a name that is not in ``TABLES``."""
    return MARK.sub(lambda found: TABLES[found[1]](), markdown)


def renewed(markdown: str) -> str:
    """A file that keeps its tables below their marks, with the tables as they are now."""
    below = re.compile(MARK.pattern.removesuffix("$") + r"\n(?:\|.*\n)*", re.MULTILINE)
    return below.sub(lambda found: f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n", markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def on_files(files: Any, *, config: Any) -> Any:
    """The picture of a report lies beside the reports, where the README shows it too."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "report.png", abs_src_path=str(ROOT / "reports" / "report.png")))
    return files


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(renewed(readme.read_text()))
