"""The shape of the house: which package may import which, and what a model's import must not pull in."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import ORDERS, circles, import_graph, imported, lone_files, upward_imports
from places import ROOT

HEAVY = ("optuna", "matplotlib", "pandas")


def test_the_parser_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b as c\nfrom d.e import f\ndef g():\n    import h\n    importlib.import_module('i.j')\n"
        "    from . import k\n"
    )
    assert sorted(name for name, _ in imported(path)) == [".", "a.b", "d.e", "h", "i.j"]


def test_the_graph_has_imports_of_functions_of_type_checking_and_relative_ones(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from sample.high.wing import x\n",
        "low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample.high.wing import x\n",
        "high/wing.py": "def f():\n    from ..low import y\n    import sample.high.roof\n",
        "high/roof.py": "from . import wing\nfrom sample import low, name\nimport os\n",
    }
    for name, text in files.items():
        path = tmp_path / "sample" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert import_graph("sample", tmp_path) == {
        "sample": {"sample.high.wing"},
        "sample.low": {"sample.high.wing"},
        "sample.high.wing": {"sample.low", "sample.high.roof"},
        "sample.high.roof": {"sample.high.wing", "sample.low", "sample"},
    }


def test_circles_and_upward_imports_are_found() -> None:
    graph = {"p": {"p.b.x"}, "p.a": {"p.b.x"}, "p.b.x": {"p.a"}, "p.b.y": {"p.b.x", "p"}, "p.c": set()}
    assert circles(graph) == [["p.a", "p.b.x"]]
    assert circles({"p.a": {"p.a"}, "p.b": {"p.a"}}) == [["p.a"]]
    assert upward_imports(graph, "p", ("a", "b")) == [
        "c has no place in the order",
        "p.a imports p.b.x",
        "p.b.y imports p",
    ]
    assert upward_imports({"p.a": set(), "p.b.x": {"p.a", "p.b.y"}, "p.b.y": set()}, "p", ("a", "b")) == []


MOST_LINES = 700
# Files that may have more, and why.
LONG: dict[str, str] = {}
# Files with a single importer beside them: none may be added. They go into their importer when that is written anew.
LONE = frozenset(
    {
        "autotune.cli.bench",
        "autotune.cli.database",
        "autotune.cli.pack",
        "autotune.cli.packing",
        "autotune.cli.tune",
        "autotune.models.mace.patched",
        "autotune.report.tuning",
        "kernelgen.kernels.radial.warpgroup",
    }
)
# Sub-packages that are more than a folder: they export names of their own.
EXPORTING = ("autotune/cli", "autotune/equitune", "autotune/report", "autotune/compare/peers")


@pytest.mark.parametrize("package", ORDERS)
def test_imports_go_down(package: str) -> None:
    assert upward_imports(import_graph(package), package, ORDERS[package]) == []


@pytest.mark.parametrize("package", ORDERS)
def test_no_files_import_each_other(package: str) -> None:
    assert circles(import_graph(package)) == []


@pytest.mark.parametrize("package", ORDERS)
def test_a_file_is_no_longer_than_a_reader_can_hold(package: str) -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} == set(LONG) & set(lengths)


def test_a_file_with_one_importer_beside_it_is_a_part_of_that() -> None:
    lone = set(lone_files(ORDERS))
    assert lone - LONE == set(), "merge each into the file that imports it"
    assert LONE - lone == set(), "take these off the list"


@pytest.mark.parametrize("package", ORDERS)
def test_a_sub_package_says_what_it_is_and_nothing_else(package: str) -> None:
    for path in (ROOT / package).glob("*/**/__init__.py"):
        if path.parent.relative_to(ROOT).as_posix() in EXPORTING:
            continue
        (only,) = ast.parse(path.read_text()).body
        text = ast.get_docstring(ast.Module([only], [])) or ""
        assert {"In:", "Out:", "Read"} <= set(text.split()), path


def test_a_folder_of_the_generator_tells_where_to_read_what() -> None:
    for path in (ROOT / "kernelgen").glob("*/**/__init__.py"):
        named = set(re.findall(r"\w+", path.read_text()))
        assert {other.stem for other in path.parent.glob("*.py")} - {"__init__"} <= named, path


@pytest.mark.parametrize("package", ORDERS)
def test_no_file_has_the_name_of_what_its_package_exports(package: str) -> None:
    """An import of the file would hide the function."""
    files = {path.stem for path in (ROOT / package).glob("*.py")} | {path.name for path in (ROOT / package).glob("*/")}
    assert files.isdisjoint(importlib.import_module(package).__all__)


def test_kernelgen_never_imports_autotune() -> None:
    """It knows nothing of tuning."""
    back = {
        path.relative_to(ROOT).as_posix(): name
        for path in (ROOT / "kernelgen").rglob("*.py")
        for name, _ in imported(path)
        if name.lstrip(".").split(".")[0] == "autotune"
    }
    assert back == {}


@pytest.mark.parametrize("package", ORDERS)
def test_one_file_imports_e3nn(package: str) -> None:
    """Else importing Equitune before ``mace`` fails where e3nn is 0.4: see that file."""
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        for name, _ in imported(path)
        if name.split(".")[0] == "e3nn"
    }
    assert importing <= {"kernelgen/compat.py"}


def loaded_after(code: str) -> set[str]:
    """Modules of a fresh interpreter that ran ``code``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_models_import_and_the_progress_lines_load_no_searching_or_plotting_package() -> None:
    loaded = loaded_after(
        # Loaded after Equitune, torch has its operators all the same: exported programs need them.
        "import kernelgen, torch\ntorch.ops.equitune.tp_forward.default, torch.ops.equitune.sc_forward.default\n"
        # All that takes as long as torch itself waits until it is used.
        "import sys\nfrom autotune import accelerate\n"
        "assert not {'torch._dynamo', 'e3nn', 'sympy'} & set(sys.modules)\n"
        "import autotune, autotune.text\nfrom autotune import *\n"
        "from autotune import TensorProduct, TensorProductConv\n"
        "TensorProductConv('4x0e+4x1o', '0e+1o', filter_irreps_out='0e+1o').tuning"
    )
    assert {"torch", "e3nn", "autotune"} <= loaded
    assert loaded.isdisjoint(HEAVY)


def test_importing_a_package_alone_costs_nothing() -> None:
    loaded = loaded_after(
        "import autotune, kernelgen\nassert 'TensorProductConv' in dir(autotune) and 'build' in dir(kernelgen)\n"
        "from kernelgen import InputError, __version__"
    )
    assert {"autotune", "kernelgen"} <= loaded
    assert loaded.isdisjoint({*HEAVY, "torch", "e3nn", "numpy"})


def test_an_unknown_name_of_a_package_is_an_attribute_error() -> None:
    import autotune
    import kernelgen

    with pytest.raises(AttributeError, match="TensorProductt"):
        _ = autotune.TensorProductt
    with pytest.raises(AttributeError, match="biuld"):
        _ = kernelgen.biuld


def test_every_name_of_the_generator_is_there() -> None:
    import kernelgen

    assert set(kernelgen._HOMES) == set(kernelgen.__all__)
    assert all(getattr(kernelgen, name) is not None for name in kernelgen.__all__)
