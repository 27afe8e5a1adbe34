"""The C++ library against the operators of Python: the same results, from a pack, without Equitune's Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import packed_calls
import pytest
import torch
from places import SUPPORT

from kernelgen.compile.host import HostCompiler
from kernelgen.compile.pack_file import PackFile
from kernelgen.device import assumed, cuda_facts
from kernelgen.packs import library as sources
from kernelgen.packs.library import build_library
from kernelgen.packs.write import write_calls

CALLS = (*packed_calls.products(), *packed_calls.harmonics(), *packed_calls.contractions())
# Value and first gradients of one convolution, a value of each other kind.
FEW = (*CALLS[:2], packed_calls.harmonics()[0], packed_calls.contractions()[0])


def index_of(op: str, arguments: list) -> str:
    """The dtype of a call's indices."""
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    return "int32" if any(one.dtype == torch.int32 and one.dim() == 1 for one in tensors[-2:]) else "int64"


def packs_of(calls: Sequence[packed_calls.Given], folder: Path, archs: Sequence[str] = ()) -> str:
    """One pack for each dtype of indices, as ``$EQUITUNE_PACK`` names them."""
    paths = []
    for index in ("int64", "int32"):
        some = [packed_calls.call_of(given) for given in calls if index_of(*given) == index]
        if some:
            paths.append(str(write_calls(some, folder / f"{index}.pack", indices=(index,), archs=archs).path))
    return os.pathsep.join(paths)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library") / "libequitune.so")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(packs_of(FEW, tmp_path_factory.mktemp("pack")))


def run(library: Path, packs: Path | str, calls: Sequence[packed_calls.Given], folder: Path) -> list:
    """The results of calls in a process that has torch alone, and can write nowhere but to its results."""
    torch.save(list(calls), folder / "calls.pt")
    environment = {"PATH": "", "HOME": "/nonexistent", "EQUITUNE_CACHE": "/nonexistent", "EQUITUNE_PACK": str(packs)}
    if "LD_LIBRARY_PATH" in os.environ:  # where a GPU's driver may be
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    command = [sys.executable, str(SUPPORT / "run_packed.py"), str(library), "calls.pt", "results.pt"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "results.pt")


def assert_agrees(found: list, calls: Sequence[packed_calls.Given]) -> None:
    errors = {}
    for place, ((op, arguments), results) in enumerate(zip(calls, found, strict=True)):
        assert not isinstance(results, str), (op, results)
        wanted = getattr(torch.ops.equitune, op)(*arguments)
        wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        for slot, (a, b) in enumerate(zip(results, wanted, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype, (op, slot)
            if op == "tp_order" and arguments[0].numel() < 10:
                continue  # of no kernel: not written
            tolerance = 1e-6 if b.dtype == torch.float32 else 1e-13
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)) if b.numel() else 0.0
            if not error <= tolerance:  # sums of atomics may have another order
                errors[place, op, slot] = error
    assert not errors


@pytest.mark.slow
def test_a_call_of_each_kind_agrees_with_python(library: Path, pack: Path, tmp_path: Path) -> None:
    assert_agrees(run(library, pack, FEW, tmp_path), FEW)


@pytest.mark.slow
def test_a_compiler_may_link_a_cpp_library_of_its_own(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers that are newer than the system do; torch brings the system's, and both are in the process."""
    monkeypatch.setenv("CXX", "g++ -static-libstdc++ -static-libgcc")
    library = build_library(tmp_path / "own.so")
    linked = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "libgcc_s" in linked and "libstdc++" not in linked
    op, (x, *rest) = FEW[0]
    *found, error = run(library, pack, [*FEW, (op, [x[:, :-1], *rest])], tmp_path)
    assert_agrees(found, FEW)
    assert "x does not fit" in error


@pytest.mark.slow
def test_every_call_agrees_with_python(library: Path, tmp_path: Path) -> None:
    assert_agrees(run(library, packs_of(CALLS, tmp_path), CALLS, tmp_path), CALLS)


def test_calls_for_a_gpu_can_be_packed(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed")
    with assumed(cuda_facts("sm_90")):
        some = packed_calls.on_a_gpu("cpu")[::29]
    packs = packs_of(some, tmp_path, ["sm_90"]).split(os.pathsep)
    kernels = [kernel for path in packs for kernel in PackFile(path).index["kernels"]]
    assert {kernel["target"] for kernel in kernels} == {"sm_90", "ptx"}


@pytest.mark.gpu
def test_every_call_on_a_gpu_agrees_with_python(library: Path, tmp_path: Path) -> None:
    calls = packed_calls.on_a_gpu("cuda:0")
    packs = packs_of(calls, tmp_path, ["sm_{}{}".format(*torch.cuda.get_device_capability())])
    assert_agrees(run(library, packs, calls, tmp_path), calls)


@pytest.mark.slow
def test_what_a_pack_lacks_and_what_does_not_fit_is_said(library: Path, pack: Path, tmp_path: Path) -> None:
    op, (x, y, w, sender, *rest) = CALLS[0]
    outside = sender.clone()
    outside[3] = 99
    unknown = [*rest[:-1], rest[-1].replace("float64", "float32")]
    calls = [
        (op, [x, y, w, outside, *rest]),
        (op, [x[:, :-1], y, w, sender, *rest]),
        (op, [x, y, w, sender, *unknown]),
        ("tp_backward", [x, y, w, x.new_zeros(6, x.shape[1]), sender, *rest[:-1], "xy", rest[-1]]),
    ]
    found = run(library, pack, calls, tmp_path)
    for text, wanted in zip(
        found,
        (
            "sender has an index outside 0..6",
            "x does not fit",
            "no pack of this process",
            "no kernels for tp_backward xy",
        ),
        strict=True,
    ):
        assert isinstance(text, str) and wanted in text


def test_nothing_of_python_is_included_or_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's call; the library itself is asked in slow tests."""
    calls = []

    def build(compiler: HostCompiler, text: str, *rest: object, **limits: float) -> bytes:
        calls.append((text, *rest))
        return b"library"

    monkeypatch.setattr(sources, "build", build)
    assert build_library(tmp_path / "libequitune.so").read_bytes() == b"library"
    ((text, *_, flags),) = calls
    assert [flag for flag in flags if flag.startswith("-l")] == ["-ltorch_cpu", "-lc10", "-ldl", "-lgcc_s"]
    texts = [text, *(path.read_text() for path in sources.source_folder().glob("*.h*"))]
    assert not [line for one in texts for line in one.splitlines() if "#include" in line and "ython" in line]


@pytest.mark.slow
def test_the_library_links_no_python(library: Path) -> None:
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, env=os.environ).stdout
    assert "libtorch_cpu" in listed and "python3" not in listed.replace(str(Path(torch.__file__).parent), "")
