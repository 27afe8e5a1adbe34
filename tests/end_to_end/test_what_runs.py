"""What `make test` leaves out runs in CI, and CI compiles every kernel anew, so its times are a fresh machine's."""

from __future__ import annotations

import re

from places import ROOT


def steps() -> list[str]:
    """The commands of ``.ci/run``, without comments."""
    return [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]


def test_ci_runs_what_make_test_leaves_out() -> None:
    (recipe,) = re.findall(r"^test:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"-m (\"[^\"]*\"|\w+)", recipe.partition("pytest")[2]) == ['"not slow"']
    assert recipe.endswith('-m "not slow" $(ARGS)'), "ARGS comes last, so its -m is the one that holds"
    assert {"step make test", 'step make test ARGS="-m slow"'} <= set(steps())


def test_ci_begins_with_an_empty_cache() -> None:
    before = steps()[: steps().index("step make setup")]
    assert "EQUITUNE_CACHE=$(mktemp -d)" in before and "export EQUITUNE_CACHE" in before
