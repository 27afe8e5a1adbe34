"""Folders of packs: what serves where there is no compiler, and what is said of a folder that is none."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import operator_cases
import pytest

from kernelgen.compile import compiler
from kernelgen.compile import pack_file as shipped
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.pack_file import PackFile, find_shipped, write_index
from kernelgen.device import device_facts
from kernelgen.errors import CacheError, PackError, ToolMissingError
from kernelgen.kernels.dispatch import emit, make_plan
from kernelgen.kernels.source import Source
from kernelgen.packs.write import Call, write_calls

HOST = device_facts("cpu")
OPERATOR = operator_cases.operator()
NO_COMPILER = ToolMissingError("no compiler")


def source() -> Source:
    (spec,) = OPERATOR.specs("forward")
    return emit(make_plan(spec))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "packs"
    path.mkdir()
    plain = write_calls([Call("tp_forward", OPERATOR.text)], tmp_path / "plain.pack").path
    packed = path / "one.pack.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    write_index(path, [packed])
    monkeypatch.setenv("EQUITUNE_PACKS", str(path))
    return path


def fail(error: Exception) -> object:
    def job(*_: object) -> object:
        raise error

    return job


def test_a_kernel_is_found_where_it_cannot_be_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PackFile(folder.parent / "plain.pack")
    code = plain.code(plain.index["kernels"][0])
    for error in (NO_COMPILER, CacheError("full")):
        monkeypatch.setattr(compiler, "host_job", fail(error))
        found = compile_source(source(), HOST)
        assert found.path.read_bytes() == code and found.resources["code_bytes"] > 0
        with pytest.raises(type(error), match=str(error)):
            compile_source(Source("nothing", "cpp"), HOST)


def test_this_processors_own_compiler_comes_first(folder: Path) -> None:
    packed = find_shipped(source(), HOST)
    assert packed is not None and compile_source(source(), HOST).path != packed.path


def test_packs_for_other_processors_are_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.compile.pack_file.processor_features", lambda: frozenset({"fp"}))
    assert find_shipped(source(), HOST) is None


def test_without_folders_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EQUITUNE_PACKS", raising=False)
    monkeypatch.setattr(shipped, "PACKAGED", tmp_path)
    assert find_shipped(source(), HOST) is None


def test_a_folder_that_is_none_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = json.loads((folder / "index.json").read_text()) | {"format": 9}
    outside = {"format": 1, "packs": [{"file": "../plain.pack", "target": "cpu", "sources": []}]}
    for content, said in (
        (None, "cannot be read"),
        ("{", "cannot be read"),
        (json.dumps(later), "has format 9"),
        (json.dumps(outside), "'../plain.pack' is no file of this folder"),
    ):
        other = tmp_path / f"other{said[-1]}{content is None}"
        other.mkdir()
        if content is not None:
            (other / "index.json").write_text(content)
        monkeypatch.setenv("EQUITUNE_PACKS", str(other))
        with pytest.raises(PackError, match=said):
            find_shipped(source(), HOST)
    with pytest.raises(PackError, match="cannot be written"):
        write_index(tmp_path / "missing", [])


def test_a_damaged_pack_of_a_folder_is_refused(folder: Path) -> None:
    path = folder / "one.pack.xz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PackError, match="cannot be read"):
        find_shipped(source(), HOST)
