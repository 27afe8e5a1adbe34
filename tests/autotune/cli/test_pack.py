"""``equitune pack``: what it writes, and one line for a mistake. What packs do is in tests/kernelgen/packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli import commands
from kernelgen import TensorProductProblem
from kernelgen.compile.pack_file import PackFile

PROBLEM = TensorProductProblem.channelwise("2x0e", "0e", "0e").key


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        commands.main(["pack", *arguments])
    return (ended.value.code, *capsys.readouterr())  # type: ignore[return-value]


def test_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "small.pack"
    code, text, errors = run(capsys, PROBLEM, "--operation", "plain", "--dtype", "float64", "--out", str(out))
    assert (code, errors) == (0, "")
    assert text.startswith(f"{out}: ") and text.endswith(f"next: EQUITUNE_PACK={out} before your program\n")
    index = PackFile(out).index
    names = {name for entry in index["operators"] for name in entry["calls"]}
    assert names == {"tp_forward", *(f"tp_backward {some}" for some in ("x", "y", "w", "xy", "xw", "yw", "xyw"))}
    assert {kernel["dtype"] for kernel in index["kernels"]} == {"float64"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "0 things say what to write"),
        (("one.pt2", "--library", "x.so"), "2 things say what to write"),
        (("missing.pt2",), "missing.pt2 cannot be read"),
        (("mace-mp-mediun",), "did you mean 'mace-mp-medium'?"),
        ((PROBLEM, "--index", "int8"), "indices are ('int8',)"),
        ((PROBLEM, "--cpu", "i386"), "cpu is 'i386'"),
        ((PROBLEM, "--arch", "sm_20"), "'sm_20' is not supported"),
        ((PROBLEM, "--dtype", "float16"), "dtype is 'float16'"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, errors = run(capsys, *arguments)
    assert (code, text) == (2, "") and words in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())
