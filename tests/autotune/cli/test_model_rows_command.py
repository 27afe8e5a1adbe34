"""``equitune bench --models``: what a user gets wrong is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli.commands import app

TINY = "tiny_model:tiny_model"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--models", "--suite"), "neither a CONFIG nor --suite"),
        (("--models", "--orders"), "nor --orders"),
        (("--orders", "--suite"), "--orders takes neither a CONFIG nor --suite"),
        (("--orders", "--older-than", "2026-11-26"), "nor --older-than"),
        (("--model", "mace-mp-0-small"), "belong to --models"),
        (("--models", "--pass", "trainin"), "did you mean 'training'"),
        (("--models", "--dtype", "float16"), "unknown dtype"),
        (("--models", "--together", "0"), "positive number"),
        (("--largest",), "--largest and --most-atoms belong to --models"),
        (("--models", "--most-atoms", "512"), "belongs to --largest"),
        (("--models", "--largest"), "expected a ceiling, such as --most-atoms 512"),
        (("--models", "--largest", "--most-atoms", "8"), "expected at least 64"),
        (("--models", "--largest", "--structure", "mof", "--seconds", "0"), "not go with --structure, --seconds"),
        (("--models", "--largest", "--together", "2"), "not go with --together"),
        (("--models", "--largest", "--dtype", "float16"), "unknown dtype"),
        (("--models", "--model", "mace-mp-0-smal"), "did you mean 'mace-mp-0-small'"),
        (("--models", "--model", "tiny_model:tiny_model", "--structure", "watr"), "watr"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code != 0
    assert text in str(result.exception)


def test_the_largest_crystals_are_printed_and_recorded(tmp_path: Path) -> None:
    options = ("--models", "--model", TINY, "--largest", "--most-atoms", "64", "--contender", "stock")
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "128 atoms: more than --most-atoms 64" in result.output and "over largest other" in result.output
    (path,) = (tmp_path / "models").glob("*.json")
    assert str(path) in result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["contenders"]["stock"]["largest"]["atoms"] == 64


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mace.package.Mace", "nequip.package.NequIP", "sevennet.package.SevenNet"):
        monkeypatch.setattr(f"autotune.models.{package}.modules", ("no_such_module",))
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--models"])
    assert "pip install mace-torch" in str(result.exception) and "pip install sevenn" in str(result.exception)
