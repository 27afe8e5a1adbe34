"""Packs in Python: what they hold, and that a process without a compiler and a cache runs from them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import operator_cases
import packed_calls
import pytest
import reference
import torch
from places import ROOT

from kernelgen.compile.job import is_whole, section
from kernelgen.compile.pack_file import PackFile, load_pack
from kernelgen.errors import InputError, PackError
from kernelgen.packs.write import Call, calls_in, recording, write_calls

OPERATOR = operator_cases.operator()
CALLS = [Call("tp_forward", OPERATOR.text), Call("tp_backward", OPERATOR.text, "", "y")]
# Value and forces' gradient of the operator above; prints their seconds and the sum of both.
PROGRAM = """
import sys, time, torch
sys.path.insert(0, "tests/support")
import operator_cases, reference
op, case = operator_cases.operator(), operator_cases.case()
x, y, w = (case.tensors[name] for name in "xyw")
begin = time.perf_counter()
with operator_cases.torch.no_grad():
    out = op(x, y, w, case.sender, case.receiver, num_out=case.num_out)
edges = (case.sender, case.receiver, case.num_out)
found = reference.run_direct(op, "edge_backward", case.tensors, *edges)["y"]
print(time.perf_counter() - begin, float(out.sum() + found.sum()))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calls(CALLS, tmp_path_factory.mktemp("pack") / "two.pack").path


def run(folder: Path, **more: str) -> subprocess.CompletedProcess:
    """The program where there is no compiler, and no folder that can be written."""
    environment = {"PATH": str(folder), "HOME": str(folder / "none"), "EQUITUNE_CACHE": str(folder / "none/cache")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | more,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_process_without_compiler_and_cache_runs_from_a_pack(pack: Path, tmp_path: Path) -> None:
    done = run(tmp_path, EQUITUNE_PACK=str(pack))
    assert done.returncode == 0, done.stderr
    seconds, total = map(float, done.stdout.split())
    case = operator_cases.case()
    graph = (case.sender, case.receiver, case.num_out)
    wanted = reference.run_direct(OPERATOR, "forward", case.tensors, *graph)["g"].sum()
    wanted += reference.run_direct(OPERATOR, "edge_backward", case.tensors, *graph)["y"].sum()
    assert abs(total - float(wanted)) < 1e-12 * abs(float(wanted)) + 1e-12
    assert seconds < 2 and not list(tmp_path.iterdir())
    assert "no C++ compiler" in run(tmp_path).stderr


def test_what_a_pack_holds(pack: Path) -> None:
    index = PackFile(pack).index
    assert {"machine", "cpu", "features", "torch", "generator", "equitune"} <= set(index)
    kernels = index["kernels"]
    assert [kernel["direction"] for kernel in kernels] == ["forward:->g", "edge_backward:->y"]
    for kernel in kernels:
        code = PackFile(pack).code(kernel)
        assert is_whole(code) and section(code, ".text") and b"libgomp" not in code
        assert kernel["target"] == "cpu" and kernel["schedule"] and "g++" in kernel["compiler"]
        assert kernel["problem"] == OPERATOR.problem.key
    (entry,) = index["operators"]
    assert entry["text"] == OPERATOR.text and set(entry["calls"]) == {"tp_forward", "tp_backward y"}


def test_writing_twice_gives_the_same_file(users_flags: None, pack: Path, tmp_path: Path) -> None:
    assert write_calls(CALLS, tmp_path / "again.pack").path.read_bytes() == pack.read_bytes()


def test_files_that_are_no_packs_are_refused(pack: Path, tmp_path: Path) -> None:
    data = bytearray(pack.read_bytes())
    later, torn = bytearray(data), data[:40]
    later[8] = 9
    for content, text in ((b"nothing", "is no pack"), (later, "has format 9"), (torn, "is damaged")):
        path = tmp_path / "bad.pack"
        path.write_bytes(content)
        with pytest.raises(PackError, match=text):
            load_pack(path)
    with pytest.raises(PackError, match="cannot be read"):
        load_pack(tmp_path / "missing.pack")
    changed = bytearray(data)
    changed[-100] ^= 1
    path.write_bytes(changed)
    with pytest.raises(PackError, match=r"is damaged \(the code of kernel .* write it again"):
        PackFile(path).code(PackFile(path).index["kernels"][-1])


def test_a_pack_for_other_processors_is_refused(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.compile.pack_file.processor_features", lambda: frozenset({"fp"}))
    with pytest.raises(PackError, match="needs a processor with"):
        load_pack(pack)


def test_an_unknown_level_and_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cpu is 'i386'"):
        write_calls(CALLS, tmp_path / "x.pack", cpu="i386")
    with pytest.raises(InputError, match="indices are"):
        write_calls(CALLS, tmp_path / "x.pack", indices=("int8",))


def test_recording_writes_what_runs(tmp_path: Path) -> None:
    from kernelgen.kernels.product.schedule import HostSchedule
    from kernelgen.ops.product import build

    op = build(operator_cases.problem(), HostSchedule(channel_block=4, path_groups=2), dtype=torch.float64)
    case = operator_cases.case()
    with recording(tmp_path / "ran.pack") as recorded:
        op(*(case.tensors[name] for name in "xyw"), case.sender, case.receiver, num_out=case.num_out)
    assert recorded.written.kernels == 1
    with pytest.raises(InputError, match="no kernel was loaded"), recording(tmp_path / "none.pack"):
        pass


def test_calls_of_an_exported_program(tmp_path: Path) -> None:
    class Energy(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return OPERATOR(*given, num_out=given[0].shape[0])

    case = packed_calls.reference.make_case(operator_cases.problem(), "conv")
    given = (*(case.tensors[name] for name in "xyw"), case.sender, case.receiver)
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Energy(), given), path)
    assert calls_in(path) == [Call("tp_forward", OPERATOR.text)]
    with zipfile.ZipFile(tmp_path / "empty.pt2", "w") as archive:
        archive.writestr("model.json", "{}")
    with pytest.raises(PackError, match="calls no operator"):
        calls_in(tmp_path / "empty.pt2")
    with pytest.raises(PackError, match="cannot be read"):
        calls_in(os.devnull)
