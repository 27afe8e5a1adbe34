"""``equitune certify``: its table, record, page and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from certified_net import CUTOFF, FAULTS, SPECIES, net

from autotune.certification.certificate import Certificate, certify
from autotune.certification.structures import draw
from autotune.cli import main
from autotune.report import write_certificate
from autotune.report.certificate import page_name

MODEL = "certified_net:net_for_commands"


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["certify", *words])
    return int(str(ended.value.code))


@pytest.fixture
def molecule(tmp_path: Path) -> str:
    path = tmp_path / "molecule.xyz"
    draw(SPECIES, CUTOFF, 0)["molecule"].write(path)
    return str(path)


def test_a_pass_has_a_table_a_record_and_a_page(
    molecule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--structure", molecule, "--paths", "equitune", "--dtype", "float64", "--quick", "--device", "cpu")
    assert exit_code(MODEL, *words, "--results", str(tmp_path), "--reports", str(tmp_path / "pages")) == 0
    printed = capsys.readouterr().out
    (record,) = (tmp_path / "certificates").glob("*.json")
    (page,) = (tmp_path / "pages").glob("*.html")
    assert f"record: {record}" in printed and f"page: {page}" in printed
    assert re.search(r"equitune, float64: pass \(\d+ s\)", printed)
    assert [row["verdict"] for row in json.loads(record.read_text())["paths"]] == ["pass", "pass"]
    assert list(json.loads(record.read_text())["structures"]) == ["molecule.xyz"]


def test_what_is_not_certified_fails(molecule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only path is refused."""
    words = ("--structure", molecule, "--paths", "equitune-fused", "--dtype", "float64", "--quick", "--device", "cpu")
    assert exit_code(MODEL, *words, "--results", str(tmp_path)) == 1
    assert "weights are formed in registers on a GPU only" in capsys.readouterr().out


@pytest.mark.slow
def test_a_named_path_that_is_refused_fails_beside_a_pass(
    molecule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--structure", molecule, "--dtype", "float64", "--quick", "--device", "cpu", "--results", str(tmp_path))
    assert exit_code(MODEL, *words, "--paths", "equitune,equitune-fused") == 1
    assert "not certified: equitune-fused in float64, which --paths names, is refused" in capsys.readouterr().out


def test_what_a_budget_ends_before_is_not_certified(
    molecule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.cli.options.what_is_left", lambda *_: 0.01)
    words = ("--structure", molecule, "--dtype", "float64", "--quick", "--device", "cpu", "--results", str(tmp_path))
    assert exit_code(MODEL, *words, "--paths", "equitune", "--budget", "1m") == 1
    printed = capsys.readouterr().out
    assert "equitune, float64: cut" in printed and "no path was asked about molecule.xyz, " in printed
    assert "not certified: equitune in float64, which --paths names, is cut" in printed
    (page,) = tmp_path.rglob("*.html")
    assert "The budget was over before paths were asked about molecule.xyz, " in page.read_text()
    assert "equitune in float64: cut by the budget" in page.read_text().replace("Equitune", "equitune")


@pytest.mark.slow
def test_all_models_are_certified_though_one_cannot_be(
    molecule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.models.whole_model.models_here", lambda: ["no.model", MODEL])
    words = ("--structure", molecule, "--paths", "equitune", "--dtype", "float64", "--quick", "--device", "cpu")
    assert exit_code("all", *words, "--results", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "no.model: model file no.model does not exist" in printed and "equitune, float64: pass" in printed
    assert len(list((tmp_path / "certificates").glob("*.json"))) == 1


def test_other_questions_have_other_files(failed: Certificate) -> None:
    record = failed.record
    asked = {"seed": 1, "effort": "normal", "structures": {}, "asked": {"paths": ["planted"], "dtypes": ["float32"]}}
    others = [record | {name: value} for name, value in asked.items()]
    assert len({page_name(one) for one in (record, *others)}) == 5
    assert page_name(record | {"made": "later", "paths": []}) == page_name(record)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.model",), "model file no.model does not exist"),
        ((MODEL, "--quick", "--thorough"), "--quick and --thorough are both given"),
        ((MODEL, "--dtype", "float16", "--device", "cpu"), "unknown dtype 'float16'"),
        ((MODEL, "--structure", "mofs", "--device", "cpu"), "did you mean 'mof'?"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*words, "--results", str(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


@pytest.fixture(scope="module")
def failed() -> Certificate:
    paths = {"planted": FAULTS["a dropped path"][0]}
    structures = {"<liquid>": draw(SPECIES, CUTOFF, 0)["molecule"]}
    return certify(net(), structures, paths=paths, dtypes=("float64",), effort="quick")


def test_the_page_says_what_fails_and_gives_the_structure(failed: Certificate, tmp_path: Path) -> None:
    page = write_certificate(failed.record, tmp_path)
    text = page.read_text()
    assert "planted in float64: not the same potential" in text and "On 1 structure, beside stock in float64" in text
    assert "8 times (NVE drift: 2 times) the figure" in text
    assert "planted, float64: energy" in text and "Properties=species:S:1:pos:R:3" in text.replace("&#34;", '"')
    assert "&lt;liquid&gt;" in text and "<liquid>" not in text
    assert text.count('<tr><th scope="row">') > 20
    assert write_certificate(failed.record, tmp_path).read_text() == text
