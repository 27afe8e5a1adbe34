"""A new kind of kernel is a file a stage and lines in tables.

The files of ``support/made_up_kind`` are laid into a copy of the packages, and ``TABLES`` says which lines are added.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import ROOT, SUPPORT

MEASURED = """class MeasuredDoubling(DoublingKind, MeasuredKind):
    tensors = staticmethod(references.make_vectors)
    reference = references.HarmonicsReference
    build = MeasuredHarmonics.build
    run = MeasuredHarmonics.run


"""
# By file: what it imports for the kind, what stands before its table, and by name of a table the kind's line in it.
TABLES = {
    "kernelgen/kernels/dispatch.py": (
        "from kernelgen.kernels.doubling import DoublingPlan, DoublingSpec, doubling_launch, doubling_plan, emit_doubling",  # noqa: E501
        "",
        {
            "PLANNERS": "DoublingSpec: doubling_plan,",
            "EMITTERS": "DoublingPlan: Emitter(emit_doubling, doubling_launch),",
        },
    ),
    "autotune/workload/known_kinds.py": (
        "from autotune.workload.doubling import DoublingKind",
        "",
        {"_KINDS": "DoublingKind(),"},
    ),
    "autotune/measure/kinds.py": (
        "from autotune.workload.doubling import DoublingKind",
        MEASURED,
        {"KINDS": "MeasuredDoubling(),"},
    ),
    "autotune/compare/peers/__init__.py": (
        "from autotune.compare.peers import doubling",
        "",
        {"ADAPTERS": "*doubling.ADAPTERS,"},
    ),
}  # fmt: skip
CONFIG = """
problem = ["tiny", "wide"]
graph = "few"
[doublings.tiny]
size = 3
[doublings.wide]
size = 8
[graphs.few]
edges = 8
"""
PROGRAM = """
import sys
from pathlib import Path

import autotune
import kernelgen
from autotune.bench.rows import SuiteRow
from autotune.compare.peers import peer_names
from autotune.database.entry import CHOICES
from autotune.measure.kinds import measured_kind, space_of
from autotune.report.rows import GROUPS
from autotune.workload.config import load_config
from autotune.workload.config import find_problem
from autotune.workload.workload import GraphClass
from kernelgen.device import device_facts
from kernelgen.kernels.dispatch import emit, geometry
from kernelgen.errors import ScheduleError
from kernelgen.kernels.dispatch import make_plan

print(Path(autotune.__file__).parent, Path(kernelgen.__file__).parent)
tiny, wide = load_config(sys.argv[1], "cpu").workloads
assert find_problem(wide.problem.key) == wide.problem != tiny.problem
assert (wide.operation, wide.directions, wide.is_conv) == ("doubling", ("forward",), False)
assert GraphClass.parse("doubling-e3") == wide.graph_class()
assert "doubling" in CHOICES["operation"]
assert measured_kind(wide.operation).operations == ("doubling",)

space = space_of(wide, "forward", device_facts("cpu"))
assert space.size == 3 and space.kind is wide.kind
plan = make_plan(space.spec)
assert emit(plan).text == "// doubling|8, cpu:unroll=1\\n"
assert geometry(plan, 5, 5, 5) == (5, 32, 0)
narrow = space_of(tiny, "forward", device_facts("cpu"))
assert narrow.broken_limit(narrow.schedule({"unroll": 4})) == "unroll=4 exceeds the 3 elements of a row"

assert peer_names("cpu", operation="doubling") == ("torch",)
assert "torch" not in peer_names("cpu", operation="conv")
assert GROUPS[SuiteRow({"operation": "doubling", "dtype": "float32"}).group] == "doubled"
"""


def add_lines(path: Path, imports: str, code: str, lines: Mapping[str, str]) -> None:
    """Add a kind's imports to a file, code before its tables, and to each named table a line at its beginning."""
    text, ahead = path.read_text(), "from __future__ import annotations\n"
    assert text.count(ahead) == 1
    text = text.replace(ahead, f"{ahead}{imports}\n")
    for table, line in lines.items():
        text, found = re.subn(rf"^({table}\b.*[{{(]\n)", lambda head: f"{code}{head[0]}    {line}\n", text, flags=re.M)  # noqa: B023
        assert found == 1, (path, table)
    path.write_text(text)


@pytest.mark.slow
def test_files_and_lines_of_tables_make_a_kind_known_to_every_layer(tmp_path: Path) -> None:
    for name in ("kernelgen", "autotune", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    made_up = SUPPORT / "made_up_kind"
    added = [path.relative_to(made_up) for path in sorted(made_up.rglob("*.py"))]
    assert not [path for path in added if (ROOT / path).exists()]  # nothing that is there is replaced
    shutil.copytree(made_up, tmp_path, dirs_exist_ok=True)
    for name, lines in TABLES.items():
        add_lines(tmp_path / name, *lines)
    (tmp_path / "made_up.toml").write_text(CONFIG)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "made_up.toml")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "autotune"), str(tmp_path / "kernelgen")]
