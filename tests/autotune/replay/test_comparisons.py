"""The file of choices that were measured beside the tuned schedule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.database.model_of_time import knobs_of
from autotune.errors import ConfigError
from autotune.replay.fit import Compared, comparisons_path, read_comparisons, store_comparisons
from kernelgen.kernels.product.schedule import CudaSchedule

SLUG = "nvidia-h200"
STUDY = ("a", "conv", "forward", "float32", "ir_mul", "conv-e8-d4")
ONE = Compared(STUDY, CudaSchedule(path_groups=3, block_size=64), "0123", 12.0, 10.0, None)
OTHER = dataclasses.replace(ONE, tuned="4567", rules_us=15.0)


def test_the_file_keeps_what_was_measured(tmp_path: Path) -> None:
    path = comparisons_path(tmp_path, SLUG)
    assert read_comparisons(path) == {}
    first, second = ({"date": date, "software": {"torch": "2"}, "driver": None} for date in ("2026", "2027"))
    store_comparisons(path, SLUG, first, [ONE])
    store_comparisons(path, SLUG, first, [OTHER])
    assert read_comparisons(path) == {ONE.key: ONE, OTHER.key: OTHER} and ONE.ratio == 1.2
    (run,) = json.loads(path.read_text())["runs"]
    assert run["date"] == "2026" and run["rows"][0] == [*STUDY, knobs_of(ONE.schedule), "0123", 1.2, 12.0, 10.0, None]

    newer = dataclasses.replace(ONE, chosen_us=11.0)
    store_comparisons(path, SLUG, second, [newer])
    assert read_comparisons(path) == {OTHER.key: OTHER, ONE.key: newer}
    assert [(run["date"], len(run["rows"])) for run in json.loads(path.read_text())["runs"]] == [
        ("2026", 1),
        ("2027", 1),
    ]
    store_comparisons(path, SLUG, second, [OTHER])
    assert [(run["date"], len(run["rows"])) for run in json.loads(path.read_text())["runs"]] == [("2027", 2)]
    assert len(path.read_text().splitlines()) < 12 and not list(path.parent.glob(".*.tmp"))


@pytest.mark.parametrize("change", [("12.0", "0.0"), ('"path_groups"', '"path_group"'), ('"ratio", ', ""), ("[", "")])
def test_a_file_of_another_form_is_an_error(tmp_path: Path, change: tuple[str, str]) -> None:
    path = comparisons_path(tmp_path, SLUG)
    store_comparisons(path, SLUG, {"date": "2026"}, [ONE])
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match="no file of measured choices"):
        read_comparisons(path)
