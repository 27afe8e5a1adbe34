"""Packs for GPUs, without one: code of each architecture; launches as Python's, seen by a stand-in of the driver."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from contraction_cases import SMALL
from operator_cases import problem
from pair_problems import of_mode
from places import SUPPORT

from kernelgen.compile import compiler
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.pack_file import PackFile, find_in_packs, load_pack, source_digest
from kernelgen.device import assumed, cuda_facts
from kernelgen.errors import InputError, ToolMissingError
from kernelgen.kernels.dispatch import AnyPlan, emit, geometry
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.kernels.source import Source
from kernelgen.kernels.spherical_harmonics import HarmonicsCudaSchedule
from kernelgen.ops import node_kernels as gates
from kernelgen.ops import node_kernels as matrices
from kernelgen.ops import tall_products as tall_matrices
from kernelgen.ops.base import OPERATORS, resolve
from kernelgen.ops.harmonics import build_harmonics
from kernelgen.ops.product import build
from kernelgen.ops.radial_convolution import FusedRadial
from kernelgen.ops.symmetric_contraction import SUMS, build_contraction
from kernelgen.packs.library import source_folder
from kernelgen.packs.write import Call, launches, recording, write_calls
from kernelgen.problem.other_kinds import HarmonicsProblem
from kernelgen.problem.product import TensorProductProblem
from kernelgen.runtime import graph as index_check
from kernelgen.runtime import kernel as cuda_driver

pytest.importorskip("cuda.core", reason="NVRTC is not installed")
pytestmark = pytest.mark.slow

ARCHS = ("sm_80", "sm_90", "sm_120")
SIZES = ((1, 1, 1), (999, 40, 60), (460_710, 5184, 4321))
SHARED = of_mode("uvw", shared=True)
CERTIFICATE = {"bitwise": True, "equivariance": 1.25e-07, "errors": {"x": 2e-07}, "device": "NVIDIA H200"}
# Takes edges by receiver always.
ROWS = CudaSchedule(accumulate="atomics", runs="waves", zeros="cut")
RADIAL = TensorProductProblem.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
# One for each call, and those of runs that take edges by receiver.
KERNELS = 11
# Blocks that a multiprocessor holds at a time, by the driver's stand-in.
HELD = 2


def calls() -> list[Call]:
    """Owners of nodes, runs of edges that zero their outputs, fill waves or store rows, sums of pairs, and others."""
    with assumed(cuda_facts("sm_80")):
        runs = CudaSchedule(accumulate="atomics", zeros="inside")
        texts = {
            "owners": build(problem(), device="cuda").text,
            "runs": build(problem(), runs, device="cuda").text,
            "waves": build(problem(), CudaSchedule(accumulate="atomics", runs="waves"), device="cuda").text,
            "rows": build(problem(shared=True), {"forward": ROWS}, device="cuda").text,
            "pairs": build(SHARED, operation="plain", device="cuda").text,
            "harmonics": build_harmonics(
                HarmonicsProblem((0, 1, 2), "component", True),
                HarmonicsCudaSchedule(64, "ahead", 1),
                device="cuda",
            ).text,
            "contraction": build_contraction(SMALL, device="cuda").text,
            "radial": _radial().text,
        }
    return [
        Call("tp_forward", texts["owners"]),
        Call("tp_backward", texts["runs"], "", "xyw"),
        Call("tp_backward", texts["waves"], "", "yw"),
        Call("tp_forward", texts["rows"]),
        Call("tp_backward", texts["pairs"], "", "xyw"),
        Call("sh_backward", texts["harmonics"]),
        Call("sc_forward", texts["contraction"]),
        Call("rc_forward", texts["radial"]),
        Call("rc_backward", texts["radial"], "", "xyw"),
    ]


def _radial() -> FusedRadial:
    """With weights formed in registers; schedules that all architectures have, and no operator of products."""
    schedules = {"forward": RadialSchedule(), "backward": RadialSchedule()}
    kernels = FusedRadial(RADIAL, 8, "ieee", "ir_mul", torch.device("cuda"), schedules)
    OPERATORS.setdefault(kernels.text, kernels)
    return kernels


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    certificates = {source_digest(emit(plan))[:16]: CERTIFICATE for plan in plans("sm_90").values()}
    path = tmp_path_factory.mktemp("pack") / "gpu.pack"
    written = write_calls(calls(), path, archs=ARCHS, certificates=certificates)
    assert written.certified >= len(certificates)
    return path


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    gxx = ("g++", "-std=c++17", "-O1", f"-I{source_folder()}")
    subprocess.run(
        [*gxx, "-fPIC", "-shared", str(SUPPORT / "driver_stand_in.cpp"), "-o", folder / "libcuda.so.1"], check=True
    )
    subprocess.run([*gxx, str(SUPPORT / "launch_probe.cpp"), "-o", folder / "probe", "-ldl"], check=True)
    return folder


def plans(arch: str) -> dict[str, AnyPlan]:
    """By the text of its direction, each kernel's plan."""
    with assumed(cuda_facts(arch, units=3)):
        found = [one for call in calls() for one in launches(resolve(call.text), call, ("int64",))]
        return {plan.spec.problem.key + plan.spec.direction.text: plan for one in found for plan in one.plans.values()}


def run(probe: Path, pack: Path, major: int, minor: int) -> list[str]:
    sizes = [str(size) for graph in SIZES for size in graph]
    command = [str(probe / "probe"), str(pack), str(major), str(minor), *sizes]
    done = subprocess.run(command, env={"LD_LIBRARY_PATH": str(probe)}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_kernel_for_each_architecture_and_ptx_for_later_ones(pack: Path) -> None:
    file = PackFile(pack)
    kernels = [kernel for kernel in file.index["kernels"] if "launch" in kernel]
    assert [kernel["target"] for kernel in kernels[:4]] == [*ARCHS, "ptx"] and len(kernels) == 4 * KERNELS
    for kernel in kernels:
        code = file.code(kernel)
        if kernel["target"] == "ptx":
            assert b".target sm_120" in code and b".entry " + kernel["entry"].encode() in code
        else:
            # The architecture in the flags of the ELF header.
            assert code[:4] == b"\x7fELF" and code[0x31] == int(kernel["target"][3:])
            assert kernel["resources"]["registers"] > 0
    certified = [kernel for kernel in kernels if kernel.get("certificate") == CERTIFICATE]
    assert {kernel["target"] for kernel in certified} >= {"sm_90"}
    assert file.index["machine"] == "" and file.index["features"] == []


@pytest.mark.parametrize("major, minor, target", [(8, 0, "sm_80"), (8, 9, "sm_80"), (9, 0, "sm_90"), (13, 0, "ptx")])
def test_launches_are_those_of_python(probe: Path, pack: Path, major: int, minor: int, target: str) -> None:
    lines = run(probe, pack, major, minor)
    assert lines[0] == f"target {target}"
    number = int(target[3:]) if target != "ptx" else 0
    assert lines.count(f"load {'cubin' if number else 'ptx'} {number}") == KERNELS
    assert not [line for line in lines if "WRONG" in line]
    kernels = PackFile(pack).index["kernels"]
    by_key = plans(target if number else ARCHS[-1])
    found = iter(line for line in lines if line.startswith(("kernel ", "launch ")))
    launched = 0
    for line in found:
        kernel = kernels[int(line.split()[1])]
        plan = by_key[kernel["problem"] + kernel["direction"]]
        sizes = SIZES[launched % len(SIZES)]
        held = HELD if getattr(plan.spec.schedule, "runs", "") == "waves" else 0
        shape = "{} {} {}".format(*geometry(plan, *sizes, held))
        assert next(found) == f"launch {shape} of right form: first 1000, {' '.join(map(str, sizes))}"
        launched += 1
    assert launched == KERNELS * len(SIZES)


def test_runs_that_store_rows_get_the_order_and_flags_for_their_zeros(pack: Path) -> None:
    """Without a kernel for edges whose order is not known: what runs a call makes that order."""
    index = PackFile(pack).index
    (launch,) = next(one["calls"]["tp_forward"] for one in index["operators"] if '"zeros": "cut"' in one["text"])
    assert (launch["order"], launch["permuted"], launch["writes"]) == ("receiver", {}, {"g": "inside"})
    kernel = index["kernels"][launch["kernels"]["int64 sm_90"]]
    assert "zeros=cut" in kernel["schedule"] and kernel["launch"]["fixed"] == 32 and kernel["launch"]["whole_waves"]


def test_no_code_for_architectures_older_than_all_of_a_pack(probe: Path, pack: Path) -> None:
    assert run(probe, pack, 10, 0) == run(probe, pack, 7, 5) == ["target "]


def test_a_damaged_pack_is_refused_without_python(probe: Path, pack: Path, tmp_path: Path) -> None:
    data = bytearray(pack.read_bytes())
    damaged, later = bytearray(data), bytearray(data)
    damaged[-100] ^= 1
    later[8] = 9
    for content, words in (
        (damaged, "is damaged"),
        (data[:-4000], "is not whole"),
        (later, "has format 9"),
        (b"\x7fELF" + bytes(100), "is no pack"),
    ):
        path = tmp_path / "bad.pack"
        path.write_bytes(content)
        done = subprocess.run([str(probe / "probe"), str(path), "9", "0"], capture_output=True, text=True)
        assert done.returncode == 1 and f"{path} {words}" in done.stderr


def test_python_finds_the_kernels(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.compile.pack_file._packs", {})
    load_pack(pack)
    plan = next(iter(plans("sm_90").values()))
    binary = find_in_packs(emit(plan), cuda_facts("sm_90"))
    assert binary is not None and binary.path.read_bytes()[0x31] == 90 and binary.resources["registers"] > 0
    assert find_in_packs(Source("nothing", "cuda"), cuda_facts("sm_90")) is None


@pytest.mark.parametrize(
    "arch, target", [("sm_80", "80"), ("sm_89", "80"), ("sm_100", ""), ("sm_121", "120"), ("sm_130", "ptx")]
)
def test_python_takes_the_code_that_a_device_runs(
    arch: str, target: str, pack: Path, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda: ctypes.CDLL(str(probe / "libcuda.so.1")))
    binary = PackFile(pack).find(emit(plans("sm_120")[next(iter(plans("sm_120")))]), cuda_facts(arch))
    assert (binary is None) == (target == "")
    if binary is not None:
        code = binary.path.read_bytes()
        assert code.startswith(b"\x7fELF") == (target != "ptx")
        assert target == "ptx" or code[0x31] == int(target)
        assert cuda_driver.load_entry(binary, "entry").handle == 0x20


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither NVRTC, nor kernels in a cache or in another test's packs."""

    def missing(*_: object) -> None:
        raise ToolMissingError("NVRTC is not installed")

    monkeypatch.setattr(compiler, "cuda_job", missing)
    monkeypatch.setattr("kernelgen.compile.pack_file._packs", {})
    monkeypatch.delenv("EQUITUNE_PACK", raising=False)


def test_kernels_at_nodes_come_from_packs(tmp_path: Path, no_compiler: None) -> None:
    path = write_calls(calls()[:1], tmp_path / "nodes.pack", archs=("sm_80", "sm_90"), nodes=("float32",)).path
    load_pack(path)
    for dtype, arch, begin in ((torch.float32, "sm_86", b"\x7fELF"), (torch.float32, "sm_120", b"//")):
        products = [matrices.ROWS.source(dtype), matrices.WEIGHTS.source(dtype)]
        edges = (tall_matrices.packing(True), tall_matrices.wide(4), tall_matrices.narrow(8), tall_matrices.summing())
        products += [kernel.source for kernel in edges]
        for source in (
            *products,
            gates.GATES.source(dtype),
            SUMS.source(dtype),
            index_check.CHECK.source(torch.int64),
        ):
            found = compile_source(source, cuda_facts(arch))
            assert found.path.read_bytes().startswith(begin), (source.entry, arch)
    with pytest.raises(ToolMissingError):
        compile_source(gates.GATES.source(torch.float64), cuda_facts("sm_90"))


def test_what_a_gpu_ran_is_recorded_for_more_architectures(tmp_path: Path) -> None:
    source = gates.GATES.source(torch.float32)
    with recording(tmp_path / "ran.pack", archs=("sm_80",)) as recorded:
        compile_source(source, cuda_facts("sm_90"))
    kernels = PackFile(recorded.written.path).index["kernels"]
    assert [(kernel["source"], kernel["target"]) for kernel in kernels] == [
        (source_digest(source), target) for target in ("sm_80", "sm_90", "ptx")
    ]


def test_architectures_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name architectures"):
        write_calls(calls()[:1], tmp_path / "none.pack")
