"""``equitune bench --models``: what a user gets wrong is one clear line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from autotune.cli.commands import app


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--models", "--suite"), "neither a CONFIG nor --suite"),
        (("--model", "mace-mp-0-small"), "belong to --models"),
        (("--models", "--pass", "trainin"), "did you mean 'training'"),
        (("--models", "--dtype", "float16"), "unknown dtype"),
        (("--models", "--together", "0"), "positive number"),
        (("--models", "--model", "mace-mp-0-smal"), "did you mean 'mace-mp-0-small'"),
        (("--models", "--model", "tiny_model:tiny_model", "--structure", "watr"), "watr"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code != 0
    assert text in str(result.exception)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mace.Mace", "nequip.NequIP", "sevennet.SevenNet"):
        monkeypatch.setattr(f"autotune.models.packages.{package}.modules", ("no_such_module",))
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", "--models"])
    assert "pip install mace-torch" in str(result.exception) and "pip install sevenn" in str(result.exception)
