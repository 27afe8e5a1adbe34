"""The tool that draws small faults: each operator makes another program, and survivors are told from the killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from mutations import Mutation, is_valid, mutations_of
from places import ROOT, TOOLS

SAMPLE = '''"""A docstring - not > text."""
import statistics
from functools import lru_cache


@lru_cache(maxsize=4)
def sample(a: int = 3, b: float = 0.5) -> float:
    """Another: a + b."""
    if a < b and not a:
        raise ValueError(f"a is {a + 1}, expected more than 2")
    total = a + b * 2.5
    total -= min(a, b)
    barrier(a, b)
    found = [x for x in (a, b) if x == 1 or x is None]
    return statistics.median(found) if found else -total
'''
OPERATORS = {
    *("off by one", "flip the sign", "negate", "drop the call", "drop the statement", "swap arguments"),
    *("< to <=", "and to or", "or to and", "+ to -", "* to /", "- to +", "min to max", "== to !=", "is to is not"),
    *("median to mean", "in to not in", "exchange true and false", "// to *", "> to >=", "any to all"),
}
MORE = "def more(a, b):\n    return any(x // 2 > 1 for x in a if x in b) if b else True\n"
C_TEXT = 'lines = [f"for (int i = 0; i < {count}; ++i) sum += x[{i - 1}] * {{y}} + z;", "__syncthreads();"]\n'
HEADER = "// a < b\n#define LANES 32\n/* 1 + 1 */ int f(int a) { a = -a; return a < 4 ? min(a, 2) + 1 : a; }\n"


def applied(source: str, **options: bool) -> dict[str, Mutation]:
    """By changed text, what makes it."""
    found = {one.apply(source): one for one in mutations_of(source, **options)}
    return {text: one for text, one in found.items() if is_valid(source, one, options.get("python", True))}


def test_each_operator_makes_another_program_that_compiles() -> None:
    seen = set()
    for source in (SAMPLE, MORE):
        made = applied(source)
        assert source not in made
        for text, one in made.items():
            compile(text, "sample", "exec")
            assert one.before != one.after and source[one.start : one.end] == one.before
            assert source.splitlines()[one.line - 1] in source
            seen.add(one.operator)
    assert seen == OPERATORS


@pytest.mark.parametrize(
    "left_alone", ['"""A docstring - not > text."""', "maxsize=4", "a is {a + 1}, expected", "a + b."]
)
def test_what_no_test_should_pin_is_left_alone(left_alone: str) -> None:
    assert all(left_alone in text for text in applied(SAMPLE))


def test_text_in_c_is_changed_in_strings_but_not_in_their_fields() -> None:
    changed = {one.operator for one in mutations_of(C_TEXT, c_text=True) if one.group == "C text"}
    assert changed == {f"C text: {change}" for change in ("0 to 1", "< to <=", "+= to -=", "* to /", "+ to -")} | {
        "C text: __syncthreads(); to ;"
    }
    assert not any(one.group == "C text" for one in mutations_of(C_TEXT))
    header = {one.before + " " + one.after for one in mutations_of(HEADER, python=False)}
    assert header == {"< <=", "4 5", "min( max(", "2 3", "+ -", "1 2", "- "}


def test_bytes_before_a_place_do_not_move_it() -> None:
    source = 'a = ("µ", 3 - 1)\n'
    assert 'a = ("µ", 3 + 1)\n' in applied(source)


TOY = """
def clipped(x, low, high):
    return max(low, min(x, high))


def never_tested(x):
    return x + 1
"""
TOY_TESTS = """
from toy.code import clipped
from hashlib import sha256


def test_clipped():
    assert (clipped(0, 1, 3), clipped(2, 1, 3), clipped(9, 1, 3)) == (1, 2, 3)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tools!r})
import mutants
setting = mutants.Setting(Path({root!r}), {{"toy": ("toy",)}}, {{"toy": ("tests/test_toy.py",)}}, (), 5.0)
drawn = list(mutants.draw(setting, 7))
run = mutants.Run(setting, Path({out!r}), jobs=2)
run.over(drawn[:{count}])
print(mutants.report(mutants.read(Path({out!r})), [mutant.name for mutant in drawn]))
"""


@pytest.mark.slow
def test_a_planted_fault_is_killed_or_survives(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out.jsonl"
    for path, text in (("toy/__init__.py", ""), ("toy/code.py", TOY), ("tests/test_toy.py", TOY_TESTS)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    def run(count: int) -> str:
        program = DRIVER.format(tools=str(TOOLS), root=str(root), out=str(out), count=count)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "2 of 5 drawn mutants were run" in run(2)
    before = out.read_text()
    out.write_text(before + '{"name": "cut sho')  # an interrupt while a line was written
    table = run(100)
    assert out.read_text().startswith(before) and len(mutants.read(out)) == 1 + 5, "a baseline, and each once"
    found = {(line["before"], line["after"]): line for line in mutants.read(out) if "before" in line}
    assert {after: line["state"] for (_, after), line in found.items()} == {
        "return min(low, min(x, high))": "killed",
        "return max(low, max(x, high))": "killed",
        "return x - 1": "survived",
        "return x + 2": "survived",
        "return x + 0": "survived",
    }
    killed = found["return max(low, min(x, high))", "return min(low, min(x, high))"]
    assert killed["test"].endswith("test_toy.py::test_clipped") and "assert" in killed["error"]
    assert (root / "toy/code.py").read_text() == TOY, "the code itself is never changed"
    assert "5 of 5 drawn mutants were run" in table and "- toy: survived 3" in table


def test_every_file_of_an_area_has_tests_and_none_that_pin_hashes() -> None:
    setting = mutants.Setting(ROOT, mutants.AREAS | mutants.ON_REQUEST, mutants.TESTS)
    for area in setting.areas:
        assert setting.files(area), area
        for path in setting.files(area):
            for selection in setting.selection(path):
                assert (ROOT / selection.split("::")[0]).exists(), selection
                assert "golden" not in selection


@pytest.mark.slow
def test_every_case_of_the_table_is_there() -> None:
    named = {name for selections in mutants.TESTS.values() for name in selections if "::" in name}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    found = subprocess.run([*command, *sorted(named)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr + found.stdout[-2000:]


@pytest.mark.slow
def test_a_draw_repeats_and_a_smaller_one_is_its_beginning() -> None:
    setting = mutants.Setting(ROOT, {"timing": mutants.AREAS["timing"]}, mutants.TESTS)
    names = [
        [mutant.name for mutant, _ in zip(mutants.draw(setting, seed), range(20), strict=False)] for seed in (3, 3, 4)
    ]
    assert names[0] == names[1] != names[2] and len(set(names[0])) == 20
    only = next(mutants.draw(setting, 3, ["autotune/measure/timing.py"]))
    assert only.path == "autotune/measure/timing.py" and json.dumps(only.place)
