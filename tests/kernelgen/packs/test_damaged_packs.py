"""Damaged packs in Python and in C++: each loads to the same meaning or is refused; no other error, crash or hang."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import damaged_packs
import packed_calls
import pytest
from damaged_packs import ELF, meaning, with_index
from places import SUPPORT

from kernelgen.compile import pack_file
from kernelgen.compile.job import is_whole
from kernelgen.compile.pack_file import PackFile, find_in_packs, load_pack, write_pack
from kernelgen.device import device_facts
from kernelgen.errors import PackError
from kernelgen.kernels.source import Source
from kernelgen.packs.library import source_folder

HOST = device_facts("cpu")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged_packs.write(tmp_path_factory.mktemp("small") / "small.pack", damaged_packs.index_of_all())


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's reader as a program."""
    path = tmp_path_factory.mktemp("reader") / "read"
    command = ["g++", "-std=c++17", f"-I{source_folder()}", str(SUPPORT / "read_packs.cpp"), "-o", str(path), "-ldl"]
    subprocess.run(command, check=True)
    return path


def read(reader: Path, paths: Iterable[Path], *first: str) -> list[str]:
    """What the library's reader says of each pack, all in one process."""
    command = [str(reader), *first, *map(str, paths)]
    done = subprocess.run(command, env={}, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr, done.stdout[-300:])
    return done.stdout.splitlines()


def test_flipped_bits_and_torn_ends(pack: Path, reader: Path, tmp_path: Path) -> None:
    data, known = pack.read_bytes(), meaning(pack)
    cases = [*damaged_packs.flipped(data, 300, seed=1), *damaged_packs.torn(data, 40, seed=2)]
    paths = [tmp_path / str(place) for place in range(len(cases))]
    loaded = []
    for path, (name, damaged) in zip(paths, cases, strict=True):
        path.write_bytes(damaged)
        try:
            assert meaning(path) == known, name
            loaded.append(True)
        except PackError:
            loaded.append(False)
    assert any(loaded) and not all(loaded)  # bytes between kernels mean nothing
    assert [said.startswith("loaded ") for said in read(reader, paths)] == loaded


def test_wrong_types_with_a_right_checksum(pack: Path, reader: Path, tmp_path: Path) -> None:
    cases = list(damaged_packs.swapped(pack.read_bytes(), meaning(pack)[0], seed=3))
    paths = [tmp_path / str(place) for place in range(len(cases))]
    loaded = []
    for path, (name, damaged, must) in zip(paths, cases, strict=True):
        path.write_bytes(damaged)
        try:
            meaning(path)
            PackFile(path).misfit()
            assert not must, name
            loaded.append(True)
        except PackError:
            loaded.append(False)
    assert sum(must for _, _, must in cases) > 300
    # Digests are Python's alone: the library compares the shorter sums.
    differing = [
        (name, said)
        for (name, _, _), said, here in zip(cases, read(reader, paths), loaded, strict=True)
        if said.startswith("loaded ") != here and "sha256" not in name
    ]
    assert not differing


@pytest.mark.parametrize(
    "old, new",
    [
        ('"offset": 0', '"offset": ' + "[" * 200_000),
        ('"offset": 0', '"offset": ' + '{"a":' * 200_000),
        ('"offset": 0', '"offset": nan'),
        ('"offset": 0', '"offset": inf'),
        ('"offset": 0', '"offset": -64'),
        ('"offset": 0', '"offset": 9007199254740993'),
        ('"offset": 0', '"offset": 0.5'),
        ('"partial_y": 0', '"partial_y": -1'),
        ('"task_nodes": 0', '"task_nodes": 0, "more": 1'),
        ('"classes": [[', '"classes": [[7, '),
        ('"classes": [[', '"classes": [[], ['),
        ('"members": [', '"members": [99, '),
        ('"int64 cpu": 0', '"int64 cpu": 12'),
        ('"int64 cpu"', '"int16 cpu"'),
        ('"rows_of_each": ', '"rows_of_each": 0, "more": '),
        ('"per": [', '"per": [0, '),
    ],
    ids=lambda text: text[:24],
)
def test_what_would_crash_the_library_is_refused(pack: Path, reader: Path, tmp_path: Path, old: str, new: str) -> None:
    data = pack.read_bytes()
    text = json.dumps(meaning(pack)[0])
    assert old in text
    path = tmp_path / "bad.pack"
    path.write_bytes(with_index(data, text.replace(old, new, 1)))
    (said,) = read(reader, [path])
    assert "is damaged" in said and said.endswith("write it again")
    with pytest.raises(PackError, match="is damaged"):
        PackFile(path)


def test_a_changed_number_with_an_old_checksum_is_refused(pack: Path, reader: Path, tmp_path: Path) -> None:
    data = pack.read_bytes()
    at = data.index(b'"widths": {"g": ') + 16
    path = tmp_path / "bad.pack"
    path.write_bytes(data[:at] + (b"2" if data[at : at + 1] != b"2" else b"3") + data[at + 1 :])
    with pytest.raises(PackError, match="its index is not what was written"):
        PackFile(path)
    assert "its index is not what was written" in read(reader, [path])[0]


def test_packs_of_the_first_format_are_to_be_written_again(pack: Path, reader: Path, tmp_path: Path) -> None:
    data, path = bytearray(pack.read_bytes()), tmp_path / "old.pack"
    data[8:16] = (1).to_bytes(4, "little") + bytes(4)
    path.write_bytes(data)
    with pytest.raises(PackError, match="has format 1; this version reads 2: write it again"):
        PackFile(path)
    assert "has format 1; this library reads 2: write it again" in read(reader, [path])[0]


def test_a_kernel_that_was_never_whole_is_refused(pack: Path, reader: Path, tmp_path: Path) -> None:
    """Its digest is right; loading it would end the process: its pages are beyond the end of the file."""
    index, codes = meaning(pack)
    assert is_whole(ELF) and not is_whole(ELF[:-1])
    path = tmp_path / "torn.pack"
    write_pack(path, index, [ELF[:-1], *codes[1:]])
    with pytest.raises(PackError, match="is not whole"):
        PackFile(path).code(PackFile(path).index["kernels"][0])
    assert "is not whole" in read(reader, [path])[0]


def test_a_pipe_or_a_device_is_no_pack(reader: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/null"), pipe, Path("/dev/full"), tmp_path):
        with pytest.raises(PackError, match="no plain file|Is a directory"):
            load_pack(path)
        assert "cannot be read" in read(reader, [path])[0]
    with pytest.raises(PackError, match="cannot be read"):
        load_pack("a\0b")


def test_packs_that_describe_an_operator_otherwise_are_not_mixed(pack: Path, reader: Path, tmp_path: Path) -> None:
    """The library runs one pack's kernels by another's description only if both say the same."""
    index, _ = meaning(pack)
    changed = {name: copy.deepcopy(index) for name in ("more", "other", "less")}
    call = {name: one["operators"][0]["calls"] for name, one in changed.items()}
    call["more"]["tp_forward"] *= 2
    call["other"]["tp_forward"][0]["writes"] = {"g": "zero"}
    del call["less"]["tp_forward"]
    paths = {name: damaged_packs.write(tmp_path / name, one) for name, one in changed.items()}
    for first, second, agree in (
        (pack, paths["more"], False),
        (paths["more"], pack, False),
        (pack, paths["other"], False),
        (pack, paths["less"], True),
        (paths["less"], pack, True),
        (pack, pack, True),
    ):
        said = read(reader, [first, second], "--together")
        assert said[0].startswith("loaded ") and said[1].startswith("loaded ") == agree, said
        assert agree or "runs an operator otherwise than a pack before it" in said[1]


def test_a_pack_of_another_generator_says_so_where_it_lacks_a_kernel(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(pack_file, "_packs", {})
    monkeypatch.setattr(pack_file, "_called_old", set())
    index, _ = meaning(pack)
    load_pack(pack)
    assert find_in_packs(Source("nothing", "cpp"), HOST) is None and not recwarn.list
    old = load_pack(damaged_packs.write(tmp_path / "old.pack", index | {"generator": "0.0.9"}))
    assert find_in_packs(Source("nothing", "cpp"), HOST) is None
    assert find_in_packs(Source("nothing", "cpp"), HOST) is None
    (warning,) = recwarn.list
    assert str(warning.message).startswith(f"{old.path} lacks a kernel: generator 0.0.9 wrote it, and this is ")


def test_the_small_pack_has_every_kind_of_call(pack: Path) -> None:
    index, _ = meaning(pack)
    ops = {name.split()[0] for entry in index["operators"] for name in entry["calls"]}
    assert ops == {"tp_forward", "tp_backward", "sh_forward", "sh_backward", "sc_forward"}
    assert any("members" in entry for entry in index["operators"])
    assert {kernel["target"] for kernel in index["kernels"]} == {"cpu", "sm_80", "ptx"}
    assert packed_calls.family().text in {entry["text"] for entry in index["operators"]}
