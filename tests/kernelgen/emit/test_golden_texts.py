"""Generated kernel texts change only on purpose, because databases refer to them by hash."""

from __future__ import annotations

import golden_texts
import pytest
from import_graph import ROOT

from autotune.database.maintenance import facts_of_record, hash_of_entry
from autotune.database.store import read_table
from kernelgen import GENERATOR_VERSION
from kernelgen.kernels.product.schedule import SCHEDULES
from kernelgen.kernels.spherical_harmonics import HARMONICS_SCHEDULES
from kernelgen.kernels.symmetric_contraction import CONTRACTION_SCHEDULES

HINT = (
    "texts changed: if that is meant, give GENERATOR_VERSION a new value and run python tests/support/golden_texts.py"
)


def test_texts_are_the_pinned_ones() -> None:
    pinned, found = golden_texts.read_golden()["texts"], golden_texts.hashes()
    assert sorted(pinned) == sorted(found), "other cases than the file has: run python tests/support/golden_texts.py"
    changed = [name for name in pinned if pinned[name] != found[name]]
    assert changed == [], HINT


def test_the_generators_version_is_that_of_the_pinned_texts() -> None:
    assert golden_texts.read_golden()["generator"] == GENERATOR_VERSION


KINDS = [*SCHEDULES.values(), *HARMONICS_SCHEDULES.values(), *CONTRACTION_SCHEDULES.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_value_of_every_knob_has_a_text(kind: type) -> None:
    schedules = [spec.schedule for spec in golden_texts.cases().values() if type(spec.schedule) is kind]
    for knob in kind.choices:
        missing = set(golden_texts.values_of(kind(), knob)) - {getattr(schedule, knob) for schedule in schedules}
        assert not missing, f"{kind.__name__}.{knob}: no text with {sorted(missing)}"


def test_changed_texts_are_not_written_under_the_same_version() -> None:
    golden = {"generator": "1+a", "texts": {"one": "h1", "gone": "h2"}}
    assert golden_texts.refusal(golden, {"one": "h1", "new": "h3"}, "1+a") == ""
    assert golden_texts.refusal(golden, {"one": "other"}, "1+b") == ""
    assert "'one', and GENERATOR_VERSION is still 1+a" in golden_texts.refusal(golden, {"one": "other"}, "1+a")


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_databases_name_texts_that_are_still_written(path) -> None:
    table = read_table(path)
    assert not table.flaws and table.by_identity
    facts = facts_of_record(table.device)
    entries = [entry for entry in table.by_identity.values() if entry.source]
    stale = [entry.identity for entry in entries if hash_of_entry(entry, facts) != entry.source]
    assert stale == [], f"{len(stale)} of {len(entries)} entries name a text that is not written any more"
