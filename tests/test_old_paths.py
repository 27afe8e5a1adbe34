"""Modules that moved are found by their old names, for one version: pickles and checkpoints name them."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys

import pytest
from import_graph import imported
from places import ROOT

import autotune.old_paths
import kernelgen.old_paths
from kernelgen.ops.base import resolve
from kernelgen.problem.product import TensorProductProblem

TABLES = {"kernelgen": kernelgen.old_paths, "autotune": autotune.old_paths}
# Imported where their package is: they are named in the tables all the same.
ELSEWHERE = ("mace", "mace_core", "nequip", "allegro", "sevenn", "torch_sim")


def moved(package: str) -> dict[str, str]:
    table = TABLES[package].MOVED
    return {f"{package}.{old}": f"{package}.{new}" for new, names in table.items() for old in names.split()}


@pytest.mark.parametrize("package", TABLES)
def test_every_old_name_gives_what_moved(package: str) -> None:
    for old, new in moved(package).items():
        try:
            home = importlib.import_module(new)
        except ModuleNotFoundError as missing:
            assert (missing.name or "").split(".")[0] in ELSEWHERE
            continue
        module = importlib.import_module(old)
        assert module is not home
        names = {name: name for name in vars(home) if name[0] != "_"}
        renamed = TABLES[package].RENAMED.get(old.partition(".")[2], {})
        assert all(getattr(module, name) is getattr(home, name) for name in names if name not in renamed)
        assert all(getattr(module, name) is getattr(home, other) for name, other in renamed.items())


@pytest.mark.parametrize("package", TABLES)
def test_no_old_name_is_that_of_another_file(package: str) -> None:
    """Nor is the folder of an old module a file now: it could not be imported."""
    for old in moved(package):
        path = ROOT / old.replace(".", "/")
        assert not path.with_suffix(".py").exists() and not (path / "__init__.py").exists()
        assert not path.parent.with_suffix(".py").exists()


def test_nobody_here_imports_by_an_old_name() -> None:
    old = {name for package in TABLES for name in moved(package)}
    for path in (path for folder in (*TABLES, "tests") for path in (ROOT / folder).rglob("*.py")):
        if path.name != "test_old_paths.py":
            assert not {name for name, _ in imported(path)} & old, path


def test_pickles_that_name_old_modules_load() -> None:
    problem = TensorProductProblem.channelwise("2x0e+2x1o", "0e+1o", "0e+1o")
    data = pickle.dumps(problem, protocol=0)
    assert data.count(b"kernelgen.problem.product") == 1
    assert pickle.loads(data.replace(b"kernelgen.problem.product", b"kernelgen.problem.tensor_product")) == problem


def test_functions_of_version_0_1_are_found() -> None:
    assert pickle.loads(b"ckernelgen.library\nresolve\n.") is resolve
    assert pickle.loads(b"ckernelgen.harmonics_library\nresolve_harmonics\n.") is resolve


def test_what_is_at_neither_place_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kernelgen.plan.nothing")
    with pytest.raises(AttributeError):
        _ = importlib.import_module("kernelgen.plan.planner").nothing


def test_old_names_work_in_a_fresh_process_without_the_new_ones() -> None:
    code = "import pickle\nprint(pickle.loads(b'ckernelgen.ops.harmonics_operator\\nbuild_harmonics\\n.').__module__)"
    done = subprocess.run([sys.executable, "-c", f"import kernelgen\n{code}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "kernelgen.ops.harmonics", done.stderr


def test_an_old_name_is_a_programs_name() -> None:
    """Of ``python -m``, whose help prints it."""
    spec = importlib.util.find_spec("kernelgen.plan.planner")
    assert spec is not None and spec.origin == "kernelgen.plan.planner"
