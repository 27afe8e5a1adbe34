"""The documentation is true: its code runs, commands and files that it names exist, figures are those of the records.

README, CONTRIBUTING and the pages of ``docs/``. Pages that need a model package run in ``tests/models/test_pages.py``.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from database_samples import entry, store
from documents import DOCS, EXAMPLES, blocks_of, commands_in, name_of, package_of, pages, run_python
from e3nn import o3
from import_graph import ORDERS
from model_samples import figures, model_row, write_models
from places import ROOT
from typer.main import get_command
from typer.testing import CliRunner

from autotune.bench.rows import SuiteRow
from autotune.cli.commands import app
from autotune.database import store as database
from autotune.models.whole_model import published_models
from autotune.workload.config import load_config
from kernelgen.arithmetic.directions import DIRECTIONS
from kernelgen.device import device_facts
from kernelgen.kernels.product.schedule import HostSchedule

README, CONTRIBUTING = (ROOT / "README.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
PLAIN = [page for page in pages() if not package_of(page)]
WITH_PYTHON = [page for page in PLAIN if any(block.language == "python" and block.is_run for block in blocks_of(page))]
by_page = {"ids": name_of}
# Written by runs, or the example of what a reader adds.
NOT_IN_GIT = ("results/certificates/", "results/quarantine", "results/quarantine/", "symmetric_contraction.py")


def hooks(path: Path = DOCS / "hooks.py") -> Any:
    """``docs/hooks.py``, which fills the site's tables; or another file that is no module of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Code.


@pytest.mark.parametrize("page", pages(), **by_page)
def test_each_block_runs_or_says_why_not(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("python", "sh", "toml", "yaml", "text"), block
        if name_of(page) != "README.md":  # which shows what the pages of docs/ run
            assert block.mark or block.language != "sh", f"mark as run or not run:\n{block.text}"


@pytest.mark.parametrize("page", WITH_PYTHON, **by_page)
def test_python_runs_as_it_stands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    model = torch.nn.Sequential(o3.FullyConnectedTensorProduct("4x0e", "1x0e", "4x0e"))
    assert run_python(page, {"model": model} if name_of(page) == "README.md" else {}) > 0


def test_there_is_something_to_test() -> None:
    assert len(WITH_PYTHON) >= 8
    assert sum(len(commands_in(page)) for page in pages()) >= 30
    assert README.count("    make tune ") == 2 and "    make test " in README
    assert len(README.splitlines()) <= 200
    assert len(DOCUMENTS[-1].read_text().splitlines()) <= 300


def test_a_convolution_of_the_pages_is_differentiable_twice() -> None:
    """As the page on e3nn's layers says."""
    space: dict[str, Any] = {}
    run_python(DOCS / "start" / "e3nn.md", space)
    conv, nodes = space["TensorProductConv"]("4x0e+4x1o", "0e+1o", filter_irreps_out="0e+1o"), torch.randn(3, 16)
    nodes.requires_grad_()
    out = conv(nodes, torch.randn(4, 4), torch.randn(4, conv.weight_numel), space["sender"], space["receiver"])
    (gradient,) = torch.autograd.grad(out.square().sum(), nodes, create_graph=True)
    gradient.square().sum().backward()
    assert nodes.grad is not None and bool(nodes.grad.any())


def test_a_tolerance_admits_a_certified_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of the page on accuracy, which needs an entry of this device."""
    from autotune import TensorProductConv

    problem = TensorProductConv("128x0e+128x1o", "0e+1o+2e+3o", filter_irreps_out="0e+1o+2e+3o").problem
    groups = HostSchedule(path_groups=len(problem.paths))
    made = [entry(groups, problem=problem.key, direction=name) for name in DIRECTIONS]
    store(tmp_path, device_facts("cpu"), *made)
    monkeypatch.setattr(database.paths, "results_dir", lambda: tmp_path)
    (block,) = (found for found in blocks_of(DOCS / "how-to" / "accuracy.md") if "tolerance=1e-5" in found.text)
    exec(block.text, {})


EXAMPLE_NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "small_mace"]


def test_each_example_has_its_output_and_a_page() -> None:
    assert len(EXAMPLE_NAMES) >= 7
    for name in EXAMPLE_NAMES:
        page = (EXAMPLES / f"{name.replace('_', '-')}.md").read_text()
        for suffix in ("py", "txt"):
            assert f'--8<-- "docs/examples/{name}.{suffix}"' in page
            assert (EXAMPLES / f"{name}.{suffix}").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLE_NAMES if not name.startswith("mace_")])
def test_an_example_prints_what_its_page_shows(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (EXAMPLES / f"{name}.txt").read_text()


def test_configs_of_the_pages_are_configs(tmp_path: Path) -> None:
    blocks = [block for page in pages() for block in blocks_of(page) if block.language == "toml"]
    assert blocks
    for block in blocks:
        (tmp_path / "page.toml").write_text(block.text)
        assert load_config(str(tmp_path / "page.toml"), backend="cpu").workloads


def test_yaml_of_the_pages_is_yaml() -> None:
    blocks = [block for page in pages() for block in blocks_of(page) if block.language == "yaml"]
    assert len(blocks) >= 2
    for block in blocks:
        assert "enable_" in json.dumps(yaml.safe_load(block.text))


# Messages of others, and one that is all values.
NOT_OURS = ("ModuleNotFoundError", "Weights only load failed", "x is torch.float32")


def texts_of_sources() -> str:
    """Every text in the code of the packages, one a line, with a tab in the place of each value; and C++ as it is."""
    texts = [path.read_text() for path in (ROOT / "kernelgen").rglob("*.cpp")]
    for path in (path for package in ("kernelgen", "autotune") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\t" for p in parts))
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_are_the_codes() -> None:
    """At least 14 letters in a row of each: the rest are values, or another text of the code."""
    page, sources = (DOCS / "troubleshooting.md").read_text(), texts_of_sources()
    messages = re.findall(r"^\*\*`(.+?)`\*\*", page, re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        if not message.startswith(NOT_OURS):
            assert any(message[at : at + 14] in sources for at in range(len(message) - 13)), message


# The command.


def help_of(*words: str) -> str:
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("page", [page for page in pages() if commands_in(page)], **by_page)
def test_every_command_and_option_exists(page: Path) -> None:
    groups = get_command(app).commands
    for command in commands_in(page):
        words = shlex.split(command)[1:]
        assert words[0] in groups, command
        children = getattr(groups[words[0]], "commands", {})
        # `tune CONFIG` is short for `tune config CONFIG`.
        short = {"tune": "config", "bench": "kernels", "replay": "records"}.get(words[0], "")
        child = [words[1] if words[1] in children else short] if children else []
        shown = help_of(words[0], *child)
        for option in re.findall(r"--[a-z-]+", command):
            assert option in shown, command


RUN = [(page, block) for page in PLAIN for block in blocks_of(page) if block.language == "sh" and block.mark == "run"]


@pytest.mark.parametrize(("page", "block"), RUN, ids=[block.text.strip() for _, block in RUN])
def test_what_only_reads_runs(page: Path, block: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder; its exit code is 0, or 1 where entries are stale."""
    (command,) = block.text.splitlines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUITUNE_DATABASE")
    done = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code in ((0, 1) if "stale" in command else (0,)), done.output
    assert done.output.strip()


def test_what_only_reads_is_run() -> None:
    assert {block.text.split()[1] for _, block in RUN} == {"doctor", "show", "db"}


# Names.


def test_each_step_of_the_walks_is_there() -> None:
    """In CONTRIBUTING: what a step names is defined in the file that it names."""
    walks = CONTRIBUTING.partition("## Three walks")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([^`]+\.py)`, `(\w+)`", walks, flags=re.MULTILINE)
    assert len(steps) == 10 + 5 + 13
    for path, name in steps:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / path).read_text(), flags=re.MULTILINE), (path, name)


DOCUMENTS = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "results" / "NOTES.md"]


@pytest.mark.parametrize("document", DOCUMENTS, **by_page)
def test_no_section_is_there_twice(document: Path) -> None:
    headings = re.findall(r"^## .*", document.read_text(), re.MULTILINE)
    assert len(set(headings)) == len(headings)


def test_every_file_that_is_named_is_there() -> None:
    """Paths from the root, and names of files alone, which may stand anywhere in packages and tests."""
    text = "\n".join(document.read_text() for document in DOCUMENTS[:-1])
    folders = "kernelgen|autotune|tests|configs|results|reports|docs"
    named = {*re.findall(rf"\b((?:{folders})/[\w./-]*[\w/])(?![\w*])", text)}
    named |= {*re.findall(r"`(\w+\.(?:py|toml|md))`", text)}
    places = ("kernelgen", "autotune", "tests", "docs")
    known = {path.name for folder in places for path in (ROOT / folder).rglob("*.*")}
    asked = {name for name in named if not re.search("DEVICE|STUDY|PACKAGE", name) and name not in NOT_IN_GIT}
    assert len(asked) > 60
    assert {name for name in asked if name not in known and not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("package", ORDERS)
def test_the_trees_are_the_packages_in_their_order(package: str) -> None:
    tree = CONTRIBUTING.partition(f"    {package}/ ")[2].partition("\n\n")[0]
    folders = [name for name in ORDERS[package] if (ROOT / package / name).is_dir()]
    assert folders and re.findall(r"^      (\w+)/", tree, re.MULTILINE) == folders


def test_every_variable_has_its_line() -> None:
    """Those that the packages read, and no others."""
    sources = [path.read_text() for package in ("kernelgen", "autotune") for path in (ROOT / package).rglob("*.py")]
    read = set(re.findall(r"environ(?:\.get\(|\[)\"((?:EQUITUNE_|CXX|HIP_)\w*)\"", "\n".join(sources)))
    listed = set(re.findall(r"^\| `(\w+)`", (DOCS / "reference" / "environment.md").read_text(), re.MULTILINE))
    assert len(read) > 9 and read <= listed
    assert all(f'"{name}"' in "\n".join(sources) for name in listed)


def test_every_public_name_is_in_the_reference() -> None:
    import autotune

    text = "\n".join((DOCS / "reference" / f"{name}.md").read_text() for name in ("models", "modules"))
    # What tune_model gives has its own docstring.
    absent = {name for name in autotune.__all__ if not re.search(rf"::: [\w.]+\.{name}\b", text)}
    assert absent == {"ModelTuning", "__version__"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Strictly: a link or an anchor that leads nowhere, or a page that nothing leads to, ends it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert {path.stem for path in built} >= {page.stem for page in pages()[1:]}
    for path in built:
        text = path.read_text()
        assert "<!-- table:" not in text and not re.search(r":(func|class|meth|attr|mod):", text), path


# Figures.


def test_the_tables_of_the_readme_are_those_of_the_records() -> None:
    made = hooks()
    assert made.renewed(README) == README, "type: python docs/hooks.py"
    assert set(made.MARK.findall(README)) == {"gains", "simulation-steps", "cpu-energies"}
    old = "<!-- table: cpu-energies -->\n| old |\n\nText"
    assert "old" not in made.renewed(old) and made.renewed(old).endswith(" |\n\nText")


def second_reader() -> Any:
    return hooks(ROOT / "tests" / "tools" / "second_reader.py")


def test_a_second_reader_finds_the_same_in_the_samples() -> None:
    reader = second_reader()
    assert {name for name, _, _ in reader.tables(README)} == set(hooks().MARK.findall(README))
    assert reader.differences(README) == []
    for name, head, body in reader.tables(README):
        for column in range(1, len(head)):
            line = next(line for line in body if line[column] not in ("-", "out of memory"))
            other = re.sub(r"\d", lambda digit: str((int(digit[0]) + 5) % 10), line[column])
            shown = " | ".join(line)
            other = " | ".join([*line[:column], other if other != line[column] else "another", *line[column + 1 :]])
            (found,) = reader.differences(README.replace(shown, other))
            assert found.startswith(f"{name}: "), (name, head[column])
        assert reader.differences(README.replace(f"| {' | '.join(body[0])} |\n", "")), "a row that is not shown"


def test_the_second_reader_knows_captured_rivals_and_stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On made-up rows, whose table is the report's."""
    passes = ("energy_forces", "energy_forces_stress", "training", "md_step")
    rows = [model_row("made-up-mace", "made-up-liquid", which, 2.0, weights="random") for which in passes]
    for row, factor in zip(rows, (1.25, 1.5, 1.75, 0.75), strict=True):
        ours = row["contenders"]["equitune"]["wall_ms"]
        row["contenders"]["equitune-captured"] = figures(ours / 3, 5184, device_ms=ours / 3)
        row["contenders"]["cuequivariance-captured"] = figures(ours / 3 * factor, 5184, device_ms=ours / 2)
    made, reader = hooks(), second_reader()
    write_models(tmp_path / "results", rows, "nvidia-h200")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    text = made.renewed("<!-- table: gains -->\n\n<!-- table: simulation-steps -->\n")
    assert "| stress: its part of that | 1.20 (1.20); 1 |" in text and "over the fastest other path's | 0.75" in text
    assert "cuEquivariance, captured: " in text
    assert reader.differences(text, tmp_path / "results") == []
    rows[0]["contenders"]["cuequivariance-captured"]["wall_samples_ms"] = [1.0]
    write_models(tmp_path / "results", rows, "nvidia-h200")
    wrong = reader.differences(text, tmp_path / "results")
    assert len(wrong) == 3, "fastest forms, the rival's capture, and the part of stress"


def test_each_table_of_the_pages_is_made() -> None:
    made = hooks()
    named = [name for page in pages() for name in made.MARK.findall(page.read_text())]
    assert set(named) == set(made.TABLES)
    for name in set(named) - {"commands"}:
        lines = made.TABLES[name]().splitlines()
        assert len(lines) > 2 and len({line.count(" | ") for line in lines if "---" not in line}) == 1, name


def test_the_matrix_of_models_follows_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hooks()
    names = [*published_models(), *(f"{name}, trained" for name in made.TRAINED)]
    assert {*map(made.certified_name, made.certificates())} <= {*published_models(), *made.TRAINED}
    lines = [line.strip("| ").split(" | ") for line in made.model_matrix().splitlines()[2:]]
    assert [line[0] for line in lines] == names
    assert all(cell.strip() and cell != made.ABSENT for line in lines for cell in line)
    (record,) = (
        one
        for one in made.certificates()
        if one["model"]["weights"].startswith("5dd94f") and one["device"]["backend"] == "cpu"
    )
    energies = [1e3 * row["differences"]["energy"] for row in record["paths"] if row["path"] == "equitune"]
    (trained,) = (line for line in lines if line[0] == "checkpoint_sevennet_0.pth, trained")
    assert trained[1].replace("\u2011", "-") == "pass: " + ", ".join(f"{energy:.1e}" for energy in energies)
    small = {"formula": "Fe2", "atoms": 2}
    changed = {"verdict": "fail", "reason": "forces is wrong on crystal", "note": "1 of 2 convolutions; stock: a, as b"}
    for row in record["paths"]:
        row |= changed
        row["checks"]["forces"]["smallest"] = small
    monkeypatch.setattr(made, "certificates", lambda: [record])
    (failed,) = (row for row in made.model_matrix().splitlines() if row.startswith("| checkpoint_sevennet_0.pth, tr"))
    assert "fail in float64: forces is wrong on crystal; smallest: Fe2, 2 atoms" in failed
    assert failed.endswith("| a, as b |")


def test_commands_name_arguments_as_their_help_does() -> None:
    _, certify = hooks().TABLES["commands"]().split("`equitune certify`", 1)
    assert "| `MODEL` |" in certify.split("## `", 1)[0]


def test_what_the_results_say_of_kernels_is_true() -> None:
    rows = json.loads((ROOT / "results" / "bench" / "nvidia-h200.json").read_text())["rows"]
    rows = [row for row in rows if row["operation"] != "radial"]
    read = [SuiteRow(row) for row in rows]
    assert not any(row.ratio <= 0.98 for row in read), "No row is more than 2% slower"
    assert all(row.memory("equitune") >= 0 for row in read), "what follows compares figures"
    assert not any(row.exceeds_memory for row in read), "and none takes more memory"
    skewed = [row for row in rows if re.search(r"-s\d+$", row["graph_class"]) and row["operation"] == "conv"]
    assert len([row for row in skewed if row["dtype"] == "float32" and "uvw" not in row["problem"]]) == 27
    assert "equitune-default" in rows[0]["times"]


def test_figures_of_lammps_are_those_of_its_rows() -> None:
    rows = json.loads((ROOT / "results" / "lammps" / "nvidia-h200.json").read_text())["rows"]
    mace = {(row["atoms"], row["gpus"]): row["step_ms"] for row in rows if row["model"] == "mace-mp-0-medium"}
    texts = " ".join(README.split()), " ".join((DOCS / "results.md").read_text().split())
    water, diamond, one, two = (mace[key] for key in ((5184, 1), (1000, 1), (41472, 1), (41472, 2)))
    assert f"takes {water:.1f} ms a step on such water and {diamond:.2f} on diamond" in texts[0]
    assert f"Two GPUs are {one / two:.2f} times as fast as one" in texts[1]
    changed = max(row["atoms_that_changed_rank"] for row in rows)
    assert f"{changed:,} of SevenNet's atoms came to the other rank" in texts[1]
