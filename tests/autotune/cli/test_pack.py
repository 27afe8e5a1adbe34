"""``equitune pack``: what it writes, and one line for a mistake. What packs do is in tests/kernelgen/packs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autotune.cli import commands
from autotune.cli import packing as of_model
from autotune.cli import packing as of_suite
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.host import default_level
from kernelgen.compile.pack_file import PackFile
from kernelgen.device import cuda_facts
from kernelgen.ops.product import build
from kernelgen.packs.write import Call
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import graph as index_check

PROBLEM = TensorProductProblem.channelwise("2x0e", "0e", "0e").key


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        commands.main(["pack", *arguments])
    return (ended.value.code, *capsys.readouterr())  # type: ignore[return-value]


def test_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "small.pack"
    code, text, errors = run(
        capsys, "problem", PROBLEM, "--operation", "plain", "--dtype", "float64", "--out", str(out)
    )
    assert (code, errors) == (0, "")
    assert text.startswith(f"{out}: ") and text.endswith(f"next: EQUITUNE_PACK={out} before your program\n")
    index = PackFile(out).index
    names = {name for entry in index["operators"] for name in entry["calls"]}
    assert names == {"tp_forward", *(f"tp_backward {some}" for some in ("x", "y", "w", "xy", "xw", "yw", "xyw"))}
    assert {kernel["dtype"] for kernel in index["kernels"]} == {"float64"}


def test_what_a_model_runs_on_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that asks for one kernel, as a model on an H200 would."""
    pytest.importorskip("cuda.core", reason="NVRTC is not installed")

    def opened(model: str, structure: str, device: str, dtype: str, training: bool) -> SimpleNamespace:
        assert (model, structure, device, dtype, training) == ("my.model", "mof", "cuda", "float64", True)
        return SimpleNamespace(
            passes={"a step": lambda: compile_source(index_check.CHECK.source(torch.int64), cuda_facts("sm_90"))}
        )

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(of_model, "open_named", opened)
    out = tmp_path / "my.pack"
    options = (
        "model",
        "my.model",
        "--structure",
        "mof",
        "--dtype",
        "float64",
        "--training",
        "--arch",
        "sm_80,sm_120",
    )
    code, text, errors = run(capsys, *options, "--out", str(out))
    assert (code, errors) == (0, "") and text.startswith(f"{out}: 4 kernels")
    assert [kernel["target"] for kernel in PackFile(out).index["kernels"]] == ["sm_80", "sm_90", "sm_120", "ptx"]


def test_a_pack_of_an_older_format_in_a_suites_folder_is_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Call(
        "tp_forward", build(TensorProductProblem.from_key(PROBLEM), operation="plain", dtype=torch.float64).text
    )
    monkeypatch.setattr(of_suite, "calls_of", lambda *_, **__: [call])
    some = [of_suite.Kernels("water", "plain", "float64", "mul_ir")]
    for _ in range(2):
        ((path, kernels),) = of_suite.write_suite(tmp_path, some, (), [default_level()])
        assert kernels == len(PackFile(path).index["kernels"]) == 1
        path.write_bytes(b"EQTNPACK" + (1).to_bytes(4, "little") + bytes(12))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "equitune pack: no PROBLEM is given; name one, or a command: exported, model, suite, library"),
        (("exported", "one.pt2", "--library", "x.so"), "No such option: --library"),
        (("exported", "missing.pt2"), "missing.pt2 cannot be read"),
        (("problem", "mace-mp-mediun"), "did you mean 'mace-mp-medium'?"),
        (("problem", PROBLEM, "--index", "int8"), "indices are ('int8',)"),
        (("problem", PROBLEM, "--cpu", "i386"), "cpu is 'i386'"),
        (("problem", PROBLEM, "--arch", "sm_20"), "'sm_20' is not supported"),
        (("problem", PROBLEM, "--dtype", "float16"), "dtype is 'float16'"),
        (("model", "my.model", "--arch", "sm_90"), "this machine has no GPU"),
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
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, text, errors = run(capsys, *arguments)
    assert (code, text) == (2, "") and words in errors and errors.count("\n") == 1
    assert not list(tmp_path.iterdir())
