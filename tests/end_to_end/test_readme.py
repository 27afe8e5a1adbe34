"""What the README shows: its Python runs as it stands, its commands and options exist, and those that only read run.

Its trees are the packages, and files that README and CONTRIBUTING name are there.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from database_samples import store
from e3nn import o3
from import_graph import ORDERS
from places import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from autotune.bench.largest import is_largest
from autotune.bench.rows import DEFAULT, OURS, fastest_peer, geometric_mean, ratio, row_name
from autotune.cli.commands import app
from autotune.database import store as database
from autotune.database.entry import Entry
from autotune.text import CAPTURED, is_ours
from kernelgen.device import device_facts

README = (ROOT / "README.md").read_text()
# Written by runs, or the example of what a reader adds.
NOT_IN_GIT = ("results/quarantine", "results/quarantine/", "symmetric_contraction.py")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^    (equitune .*?)(?:\s+#.*)?$", README, re.MULTILINE)
IRREPS = ("128x0e+128x1o", "32x0e+32x1o")


def graph() -> dict[str, Any]:
    """What a reader has: a graph, features and weights for any of the shown convolutions, and a model."""
    sender, receiver = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 0, 0, 1])
    model = torch.nn.Sequential(o3.FullyConnectedTensorProduct("4x0e", "1x0e", "4x0e"))
    return {"sender": sender, "receiver": receiver, "edge_attrs": torch.randn(4, 16), "model": model}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_python_runs_as_it_stands(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path)
    certify(tmp_path)
    space = graph()
    head, calls, tail = block.partition("out = conv(")
    exec(head, space)
    if calls:
        conv = space["conv"]
        nodes = torch.randn(3, conv.irreps_in1.dim, requires_grad=True)
        space |= {"node_feats": nodes, "weights": torch.randn(4, conv.weight_numel), "edge_vectors": torch.randn(4, 3)}
        exec(calls + tail, space)
        out = space["out"]
        assert out.shape == (3, conv.irreps_out.dim)
        (gradient,) = torch.autograd.grad(out.square().sum(), nodes, create_graph=True)
        gradient.sum().backward()
        assert nodes.grad is not None


def certify(folder: Path) -> None:
    """A record that keeps what a block asks for, for every direction of its convolution."""
    from database_samples import entry

    from autotune.modules.convolution import TensorProductConv
    from kernelgen.arithmetic.directions import DIRECTIONS
    from kernelgen.kernels.product.schedule import HostSchedule

    problem = TensorProductConv("128x0e+128x1o", "0e+1o+2e+3o", filter_irreps_out="0e+1o+2e+3o").problem
    groups = HostSchedule(path_groups=len(problem.paths))
    made: list[Entry] = [entry(groups, problem=problem.key, direction=name) for name in DIRECTIONS]
    store(folder, device_facts("cpu"), *made)


def test_there_is_something_to_test() -> None:
    assert len(BLOCKS) >= 4 and len(COMMANDS) >= 12
    assert README.count("    make tune ") == 2 and "    make test " in README


def test_every_command_and_option_exists() -> None:
    helps: dict[tuple[str, ...], str] = {}
    for command in COMMANDS:
        words = command.split()[1:]
        group = get_command(app).commands[words[0]]
        name = tuple(words[: 2 if words[1:] and words[1] in getattr(group, "commands", ()) else 1])
        helps[name] = help_of(*name)
        for option in re.findall(r"--[a-z-]+", command):
            assert option in helps[name], command
    listing = README[README.index("## Command line") : README.index("## Many tuners at once")]
    for option in re.findall(r"--[a-z][a-z-]+", listing):
        assert any(option in text for text in helps.values()), option
    shown = help_of()
    for name in {name[0] for name in helps}:
        assert name in shown


@pytest.mark.parametrize("command", ["doctor", "show mace-mp-medium", "db stale"])
def test_what_only_reads_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder; its exit code is 0, or 1 where entries are stale."""
    assert any(line.startswith("equitune " + command.split(" --")[0]) for line in COMMANDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUITUNE_DATABASE")
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 0 or (command == "db stale" and done.exit_code == 1), done.output
    assert done.output.strip()


def test_each_step_of_the_walks_is_there() -> None:
    """In CONTRIBUTING: what a step names is defined in the file that it names."""
    walks = (ROOT / "CONTRIBUTING.md").read_text().partition("## Three walks")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([^`]+\.py)`, `(\w+)`", walks, flags=re.MULTILINE)
    assert len(steps) == 10 + 5 + 13
    for path, name in steps:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), flags=re.MULTILINE), (path, name)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "results/NOTES.md"])
def test_no_section_is_there_twice(document: str) -> None:
    headings = re.findall(r"^## .*", (ROOT / document).read_text(), re.MULTILINE)
    assert len(headings) > 3 and len(set(headings)) == len(headings)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_is_there(document: str) -> None:
    """Paths from the root, and names of files alone, which may stand anywhere in packages and tests."""
    text = (ROOT / document).read_text()
    folders = "kernelgen|autotune|tests|configs|results|reports"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*|\w+\.(?:py|toml|md))`", text))
    known = {path.name for folder in ("kernelgen", "autotune", "tests") for path in (ROOT / folder).rglob("*.*")}
    asked = {name for name in named if "DEVICE" not in name and name not in NOT_IN_GIT}
    assert len(asked) > 10
    assert {name for name in asked if name not in known and not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("package", ORDERS)
def test_the_trees_are_the_packages_in_their_order(package: str) -> None:
    tree = README.partition(f"    {package}/ ")[2].partition("\n\n")[0]
    folders = [name for name in ORDERS[package] if (ROOT / package / name).is_dir()]
    assert folders and re.findall(r"^      (\w+)/", tree, re.MULTILINE) == folders


def help_of(*words: str) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    return shown.output


def two_digits(value: float) -> str:
    """Rounded down, as in the report."""
    return f"{math.floor(value * 100 + 1e-9) / 100:.2f}"


def kind_of(row: dict[str, Any]) -> str:
    """As the README's table names it."""
    name = {"conv": "convolutions", "plain": "plain products"}.get(row["operation"], row["operation"])
    name = {
        "harmonics": "spherical harmonics",
        "vectors": "convolutions of edge vectors",
        "contraction": "symmetric contractions",
    }.get(name, name)
    if "uvw" in row["problem"]:
        name = "fully connected"
    return f"{name}, {row['dtype']}" + ", deterministic" * row["deterministic"]


# The passes of a column.
COLUMNS = (("forward",), ("backward", "edge_backward"), ("force_step", "double_backward"))


def untuned_ratio(row: dict[str, Any]) -> float | None:
    """:func:`ratio` of the untuned default."""
    default, tuned, value = row["times"].get(DEFAULT, {}), row["times"][OURS], ratio(row)
    if value is None or "time_us" not in default:
        return None
    return value * tuned["time_us"] / default["time_us"]


def test_the_figures_are_those_of_the_record() -> None:
    """Of each kind of row: how many, and by pass the geometric mean and the least of fastest peer over ours."""
    rows = json.loads((ROOT / "results" / "bench" / "nvidia-h200.json").read_text())["rows"]
    # What fused radial convolutions are compared with are other forms of ours.
    rows = [row for row in rows if row["operation"] != "radial"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    table = README[README.index("| | rows |") : README.index("*Untuned* is the default")]
    shown = {}
    for line in re.findall(r"^\| ([a-z].*) \|$", table, re.MULTILINE):
        kind, count, *passes = line.split(" | ")
        shown[kind] = (int(count), *passes)
    expected = {}
    for kind, group in kinds.items():
        figures = []
        for which in (ratio, untuned_ratio):
            ratios = [[which(row) for row in group if row["pass"] in column] for column in COLUMNS]
            figures += [[value for value in values if value is not None] for values in ratios]
        expected[kind] = (
            len(group), *(f"{two_digits(geometric_mean(v))} ({two_digits(min(v))})" if v else "-" for v in figures)
        )  # fmt: skip
    assert shown == expected
    slower = [row_name(row) for row in rows if (value := ratio(row)) is not None and value < 1]
    level = ["mace-mp-contraction-1o on 21-nodes, contraction float32, forward"]
    level += ["nequip-water on iron, plain float32, forward"]
    assert sorted(slower) == level, "as the README says"
    assert min(value for row in rows if (value := ratio(row)) is not None) > 0.985
    needs_more = [row_name(row) for row in rows if row["memory"][OURS] > row["memory"].get(fastest_peer(row), math.inf)]
    assert not needs_more, "as the README says"


def test_the_figures_of_fused_convolutions_are_those_of_the_record() -> None:
    """Milliseconds of diamond's layers, fused, with our product and with torch's; MiB of a value with its gradients."""
    rows = json.loads((ROOT / "results" / "bench" / "nvidia-h200.json").read_text())["rows"]
    rows = [row for row in rows if row["operation"] == "radial" and row["graph"]["name"] == "carbon"]
    recorded = {(row["label"], row["pass"]): row for row in rows}
    table = README[README.index("| layer, diamond |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        layer, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        forms = (OURS, "product-fp16x3", "product-ieee")
        expected = []
        for which in ("forward", "backward"):
            times = recorded[f"{MODELS[layer].replace('mp-0', 'mp')}-radial", which]["times"]
            expected.append(", ".join(f"{times[form]['time_us'] / 1e3:.3g}" for form in forms))
        memory = recorded[f"{MODELS[layer].replace('mp-0', 'mp')}-radial", "forward+backward"]["memory"]
        assert shown == [*expected, ", ".join(f"{memory[form] / 2**20:.0f}" for form in forms[:2])], line
        assert memory["product-fp16x3"] > 10 * memory[OURS]
    assert len(table.splitlines()) == 5


# The README's names of the models, structures and passes in its table.
MODELS = {
    "SevenNet-l3i5": "sevennet-l3i5",
    "SevenNet-0": "sevennet-0",
    "NequIP-OAM-L": "nequip-oam-l",
    "NequIP, 64 features": "nequip-small",
    "Allegro-OAM-L": "allegro-oam-l",
    "MACE-MP-0 medium": "mace-mp-0-medium",
    "MACE-MP-0 large": "mace-mp-0-large",
}
STRUCTURES = {"water": "water-box", "diamond": "carbon", "protein": "protein", "aspirin": "aspirin"}
MODEL_PASSES = {"energies and forces": "energy_forces", "training": "training"}


def timed_rows() -> list[dict[str, Any]]:
    """Rows of models, without those of the largest crystals."""
    rows = json.loads((ROOT / "results" / "models" / "nvidia-h200.json").read_text())["rows"]
    return [row for row in rows if not is_largest(row)]


def test_the_figures_of_models_are_those_of_the_record() -> None:
    """Milliseconds of Equitune, the untuned default, the fastest other path and stock."""
    rows = timed_rows()
    recorded = {(row["model"], row["structure"], row["pass"]): row for row in rows}
    table = README[README.index("| model | structure, atoms |") : README.index("Small structures wait")]
    model, place, seen = "", "", 0
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 7:
            continue
        model, place = cells[0] or model, cells[1] or place
        structure, atoms = place.split(", ", 1)
        row = recorded[MODELS[model], STRUCTURES[structure], MODEL_PASSES[cells[2]]]
        assert row["atoms"] == int(atoms.replace(",", ""))
        times = {name: cell.get("wall_ms") for name, cell in row["contenders"].items()}
        others = [time for name, time in times.items() if time and not is_ours(name) and name != "stock"]
        assert cells[4] == (three_digits(times[DEFAULT]) if DEFAULT in times else "-"), line
        assert cells[3] == three_digits(times[OURS]) and cells[5] == three_digits(min(others)), line
        stock = times.get("stock", 0.0)
        assert cells[6] == (three_digits(stock) if stock else "out of memory" if stock is None else "-"), line
        seen += 1
    assert seen == 24


def test_the_figures_of_captured_steps_are_those_of_the_record() -> None:
    """Milliseconds of energies and forces of aspirin: captured, not captured, the fastest other path and stock."""
    rows = timed_rows()
    recorded = {row["model"]: row for row in rows if (row["structure"], row["pass"]) == ("aspirin", "energy_forces")}
    table = README[README.index("| model | captured |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        model, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        cells = recorded.pop(MODELS[model])["contenders"]
        times = {name: cell["wall_ms"] for name, cell in cells.items() if "wall_ms" in cell}
        other = min(time for name, time in times.items() if not is_ours(name) and name != "stock")
        expected = (times[CAPTURED], times[OURS], other, times["stock"])
        assert shown == [f"{time:.2f}" if time < 10 else three_digits(time) for time in expected], line
    assert not recorded


def test_the_memory_of_captured_steps_is_that_of_the_record() -> None:
    """Least and most, relative to the leanest other path, of the rows that have it."""
    ratios = []
    for row in timed_rows():
        held = {name: cell["peak_mib"] for name, cell in row["contenders"].items() if cell.get("peak_mib")}
        if CAPTURED in held:
            ratios.append(held[CAPTURED] / min(size for name, size in held.items() if not is_ours(name)))
    assert f"takes {two_digits(min(ratios))} to {two_digits(max(ratios))} times as much" in " ".join(README.split())


def test_the_means_of_models_are_those_of_the_record() -> None:
    """Fastest other path over ours; memory lower than that of every other path. MACE's are without aspirin."""
    table = README[README.index("| model | rows |") :].split("\n\n")[0]
    seen = set()
    for line in table.splitlines()[2:]:
        name, rows, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        first = name.split(" and ")[0]
        models = [MODELS[one] for one in (first, *(["MACE-MP-0 large"] if first != name else []))]
        some = [row for row in timed_rows() if row["model"] in models]
        some = [row for row in some if len(models) == 1 or row["structure"] != "aspirin"]
        ratios: dict[str, list[float]] = {}
        for row in some:
            name_of_row = (row["model"], row["structure"], row["pass"])
            cells = {name: cell for name, cell in row["contenders"].items() if "wall_ms" in cell}
            ours = cells[OURS]
            cells = {name: cell for name, cell in cells.items() if not is_ours(name)}
            if not cells:  # out of memory by every other path
                assert name_of_row == ("allegro-oam-l", "carbon", "training")
                continue
            if row["model"] != "allegro-oam-l" and name_of_row != ("sevennet-0", "aspirin", "energy_forces"):
                assert ours["peak_mib"] < min(cell["peak_mib"] for cell in cells.values()), row["structure"]
            others = [cell["wall_ms"] for name, cell in cells.items() if name != "stock"]
            ratios.setdefault(row["pass"], []).append(min(others) / ours["wall_ms"])
        means = [f"{geometric_mean(ratios[kind]):.1f} ({min(ratios[kind]):.2f})" for kind in MODEL_PASSES.values()]
        assert (int(rows), shown) == (len(some), means), name
        seen |= set(models)
    assert seen == {row["model"] for row in timed_rows()}


def three_digits(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds < 100 else f"{milliseconds:.0f}"
