"""``equitune bench models`` and ``largest``: what a user gets wrong is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli.commands import app, main

TINY = "tiny_model:tiny_model"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("models", "mace-mp-0-small"), "unexpected extra argument"),
        (("models", "--pass", "trainin"), "did you mean 'training'"),
        (("models", "--dtype", "float16"), "unknown dtype"),
        (("models", "--together", "0"), "positive number"),
        (("models", "--most-atoms", "512"), "No such option: --most-atoms"),
        (("models", "--model", "mace-mp-0-smal"), "did you mean 'mace-mp-0-small'"),
        (("models", "--model", "tiny_model:tiny_model", "--structure", "watr"), "watr"),
        (("largest",), "expected a ceiling, such as --most-atoms 512"),
        (("largest", "--most-atoms", "8"), "expected at least 64"),
        (("largest", "--structure", "mof"), "No such option: --structure"),
        (("largest", "--together", "2"), "No such option: --together"),
        (("largest", "--dtype", "float16"), "unknown dtype"),
        (("orders", "suite"), "unexpected extra argument"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments, "--device", "cpu"])
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_the_largest_crystals_are_printed_and_recorded(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--model", TINY, "--most-atoms", "64", "--contender", "stock")
    result = CliRunner().invoke(app, ["bench", "largest", *options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "128 atoms: more than --most-atoms 64" in result.output and "over largest other" in result.output
    (path,) = (tmp_path / "models").glob("*.json")
    assert str(path) in result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert row["contenders"]["stock"]["largest"]["atoms"] == 64


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mace.package.Mace", "nequip.package.NequIP", "sevennet.package.SevenNet"):
        monkeypatch.setattr(f"autotune.models.{package}.modules", ("no_such_module",))
    result = CliRunner().invoke(app, ["bench", "models", "--device", "cpu"])
    assert "pip install mace-torch" in str(result.exception) and "pip install sevenn" in str(result.exception)
