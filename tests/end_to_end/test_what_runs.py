"""What `make test` leaves out runs in CI, and CI compiles every kernel anew, so its times are a fresh machine's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from places import ROOT


def steps() -> list[str]:
    """The commands of ``.ci/run``, without comments."""
    return [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]


def test_ci_runs_what_make_test_leaves_out() -> None:
    (recipe,) = re.findall(r"^test:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"-m (\"[^\"]*\"|\w+)", recipe.partition("pytest")[2]) == ['"not slow"']
    assert recipe.endswith('-m "not slow" $(ARGS)'), "ARGS comes last, so its -m is the one that holds"
    all_tests = """step make test ARGS="-m '' --slow $commits/2 --others $OTHERS\""""
    assert {"export OTHERS=$commits/8", all_tests} <= {*steps()}, "CI runs all within eight commits"
    text = " ".join(steps())
    assert "packages=(mace nequip sevennet) export SLOW=${packages[commits % ${#packages[@]}]}" in text, (
        "slow tests of each package run within three commits"
    )
    assert "step .ci/models nequip sevennet && step make tune" in text and "step .ci/models mace end" in text


def test_ci_begins_with_an_empty_cache() -> None:
    before = steps()[: steps().index("step make setup")]
    assert "EQUITUNE_CACHE=$(mktemp -d)" in before and "export EQUITUNE_CACHE" in before


@pytest.mark.parametrize(("command", "code"), [("echo said", 0), ("echo said; exit 3", 3)], ids=["well", "failed"])
def test_a_step_beside_others_is_printed_whole_and_its_failure_ends_the_run(
    tmp_path: Path, command: str, code: int
) -> None:
    lines = (ROOT / ".ci" / "run").read_text()
    functions = lines[lines.index("step() {") : lines.index("# The report's pages")]
    script = f"""set -euo pipefail; logs={tmp_path}
{functions}
begin other bash -c '{command}'
step echo next
end other
echo passed"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("==")]
    assert said == ["next", "said", *([] if code else ["passed"])]
    assert f"exit code {code}: bash -c" in done.stdout
