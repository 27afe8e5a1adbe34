"""Database files that something has damaged: whatever they hold, they are read, or refused with a reason.

``EQUITUNE_FUZZ=100000`` tries that many files of each kind; by default few.
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from database_samples import GPU, HOST, entry, store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.database.maintenance import merge_file, stale_entries
from autotune.database.store import Table, read_table
from autotune.errors import DatabaseError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.schedule import CudaSchedule

NUMBER = int(os.environ.get("EQUITUNE_FUZZ", "75"))
FUZZ = settings(max_examples=NUMBER, deadline=None, suppress_health_check=list(HealthCheck))
HOSTILE = (
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "~/x",
    "__import__('os')",
    "nan",
    "\u0000",
    "cuda",
    "sh|1|norm|raw",
    "",
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(HOSTILE),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a good file holds: a host's and a GPU's schedule, notes of a check, a hash."""
    cuda = entry(CudaSchedule(), direction="backward", source="0" * 16)  # type: ignore[arg-type]
    checked = entry(dtype="float64", checked={"date": "d", "state": "drifted", "time_us": 3.0})
    path = store(tmp_path_factory.mktemp("sound"), HOST, entry(), cuda, checked)
    return json.loads(path.read_text())


def places(data: Any, path: tuple = ()) -> list[tuple]:
    """Every place in nested data but the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


def changed(data: Any, path: tuple, value: Any) -> Any:
    """A copy with another value in one place."""
    copied = json.loads(json.dumps(data))
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def is_sane(table: Table) -> None:
    """What was let in is an entry in every respect: bounded knobs, and no path that leaves the folder."""
    for identity, found in table.by_identity.items():
        assert found.identity == identity and isinstance(found.tuned_schedule, Knobs)
        name = PurePosixPath(found.trials.get("file", ""))
        assert not name.is_absolute() and ".." not in name.parts
    stale_entries(table, {})


def hold(folder: Path, data: bytes) -> None:
    """Read the file, and join it with a database that is there: done, or refused without a change."""
    path, here = folder / "theirs.json", folder / "here"
    path.write_bytes(data)
    is_sane(read_table(path))
    kept = store(here, GPU, entry())
    before = kept.read_bytes()
    try:
        target, _ = merge_file(path, here)
    except DatabaseError:
        assert kept.read_bytes() == before
    else:
        assert target.parent == here and not read_table(target).flaws


@FUZZ
@given(data=st.data())
def test_any_value_in_any_place(sound: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = data.draw(st.sampled_from(places(sound)))
    text = json.dumps(changed(sound, path, data.draw(VALUES)))
    hold(tmp_path_factory.getbasetemp(), text.encode("utf-8", "surrogatepass"))


@FUZZ
@given(start=st.floats(0, 1), length=st.integers(0, 300), patch=st.binary(max_size=12), cut=st.booleans())
def test_any_bytes(
    sound: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    start: float,
    length: int,
    patch: bytes,
    cut: bool,
) -> None:
    text = json.dumps(sound, indent=1).encode()
    at = int(start * len(text))
    hold(tmp_path_factory.getbasetemp(), text[:at] + patch + (b"" if cut else text[at + length :]))
