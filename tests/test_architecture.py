"""The shape of the house: which package may import which, and what a model's import must not pull in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("optuna", "matplotlib", "pandas")


def imported(path: Path) -> Iterator[str]:
    """Every module name that a file imports, wherever in it; literal ``import_module`` calls too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def test_the_parser_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import a.b as c\nfrom d.e import f\ndef g():\n    import h\n    importlib.import_module('i.j')\n"
        "    from . import k\n"
    )
    assert sorted(imported(path)) == [".", "a.b", "d.e", "h", "i.j"]


@pytest.mark.parametrize("path", sorted((ROOT / "kernelgen").rglob("*.py")), ids=lambda path: path.name)
def test_kernelgen_never_imports_autotune(path: Path) -> None:
    back = [name for name in imported(path) if name.lstrip(".").split(".")[0] == "autotune"]
    assert back == [], f"{path} imports {back}: kernelgen knows nothing of tuning"


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter that ran ``code``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = f"{code}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_models_import_and_the_progress_lines_load_no_searching_or_plotting_package() -> None:
    loaded = loaded_after(
        "import kernelgen, autotune, autotune.report.words\nfrom autotune import *\n"
        "from autotune import TensorProduct, TensorProductConv\n"
        "TensorProductConv('4x0e+4x1o', '0e+1o', filter_irreps_out='0e+1o').tuning"
    )
    assert {"torch", "e3nn", "autotune"} <= loaded
    assert loaded.isdisjoint(HEAVY)


def test_importing_autotune_alone_costs_nothing() -> None:
    loaded = loaded_after("import autotune\nassert 'TensorProductConv' in dir(autotune)")
    assert "autotune" in loaded
    assert loaded.isdisjoint({*HEAVY, "torch", "e3nn", "numpy"})


def test_an_unknown_name_of_autotune_is_an_attribute_error() -> None:
    import autotune

    with pytest.raises(AttributeError, match="TensorProductt"):
        _ = autotune.TensorProductt
