"""What is shipped compiles for the GPUs that nobody has here, within their limits; a sample of it, see `.ci/run`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
from places import ROOT

from autotune.cli import commands
from autotune.database.lookup import find_schedule
from autotune.database.store import load_table
from autotune.replay.portability import (
    Finding,
    PortableKernel,
    check_arch,
    distinct,
    examine,
    kernels_of_entries,
    sampled,
)
from autotune.workload.config import load_problems
from kernelgen.device import CUDA_ARCHS, DeviceFacts, representative
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.product.plan import easy_registers, small_graph_edges
from kernelgen.kernels.product.schedule import CudaSchedule

SHIPPED = load_table(ROOT / "results" / "nvidia-h200.json")


@pytest.fixture(autouse=True)
def no_databases_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("autotune.paths.user_data_dir", lambda: tmp_path)


@pytest.fixture(autouse=True)
def entries_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each architecture, in 40 processor seconds; `db check` in CI plans for itself."""
    monkeypatch.setattr("autotune.replay.portability.kernels_of_entries", lambda facts: entries_on(facts.arch))


@functools.cache
def entries_on(arch: str) -> tuple[PortableKernel, ...]:
    return tuple(kernels_of_entries(representative(arch)))


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_100"])
def test_a_sample_of_what_is_shipped_compiles_within_the_cards_limits(arch: str) -> None:
    """Every kind of kernel on the three kinds of limits; another capability differs in the compiler's target alone."""
    chosen = sampled(distinct(entries_on(arch)), 14)
    targets = {"sm_80": ("sm_80",), "sm_86": ("sm_86", "sm_89", "sm_120"), "sm_100": ("sm_90", "sm_100")}[arch]
    for target in targets:
        found = [examine(kernel, representative(target)) for kernel in chosen]
        assert all(one.registers for one in found) and len(found) == 14
        assert [(target, one.kernel.name, one.fault) for one in found if one.fault] == []


FOR_HOPPER = [
    *(
        f"sevennet-l3i5-radial radial forward float32 ir_mul radial-{size}"
        for size in ("e16-d5", "e17-d7", "e19-d6", "e8-d4")
    ),
    "mace-mp-large-radial-tf32 radial forward float32 ir_mul radial-e17-d7",
]


@pytest.mark.slow
def test_every_entry_is_served_where_shared_memory_is_smallest() -> None:
    """Not by a default: what exceeds the limits has a legal form, and only that is changed.

    But for fused values for Hopper's shared memory, which need more path groups: no form of the entries has these.
    """
    served = entries_on("sm_86")
    by_default = [kernel.name for kernel in served if kernel.origin != "other-device"]
    assert len(served) == len(SHIPPED.by_identity)
    assert sorted(by_default) == sorted(FOR_HOPPER)
    assert 0 < sum(kernel.is_changed for kernel in served) < 0.4 * len(served)


def test_what_is_prefetched_fits_into_a_smaller_l2() -> None:
    """Of an A10, an eighth of an H200's: but not of an L40S, which has more."""
    kernel = (load_problems()["mace-mp-large"], "conv", "edge_backward", "float32", "ir_mul")
    tuned = find_schedule(*kernel, representative("sm_90"), "conv-e17-d3").schedule
    assert tuned.ahead == "weights", "the H200's entry prefetches; if it is tuned anew, take another that does"
    larger, smaller = (find_schedule(*kernel, representative(arch), "conv-e17-d3") for arch in ("sm_89", "sm_86"))
    assert larger.schedule == tuned
    cuts = {knob for knob, value in smaller.schedule.to_dict().items() if value != tuned.to_dict()[knob]}
    assert cuts and cuts <= {"ahead", "stage_edges"} and "for this device's limits" in smaller.reason


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_the_report_counts_what_it_looked_at(arch: str) -> None:
    report = check_arch(arch, sample=30)
    assert report.entries == len(SHIPPED.by_identity) and report.defaults > 500 and report.texts > 600
    assert len(report.findings) == 30 and report.faults == ()
    assert (report.changed > 0) == (arch != "sm_90")


def test_the_form_for_less_shared_memory_keeps_what_a_team_does() -> None:
    problem = load_problems()["mace-mp-large"]
    kernel = (problem, "conv", "forward", "float32", "ir_mul")
    tuned = find_schedule(*kernel, representative("sm_90"), "conv-e17-d7")
    found = find_schedule(*kernel, representative("sm_86"), "conv-e17-d7")
    assert tuned.schedule.block_size == 256 and found.origin == "other-device"
    assert found.schedule == dataclasses.replace(tuned.schedule, block_size=64)
    assert "NVIDIA H200 (sm_90, this is sm_86: never measured here)" in found.reason
    assert "with block_size=64 for this device's limits" in found.reason


@pytest.mark.slow
def test_a_limit_of_registers_is_left_to_blackwells_compiler() -> None:
    """Which takes more of them for the same text: 2,828 bytes would spill, and 36 did on an H200."""
    kernel = (load_problems()["mace-mp-first"], "conv", "double_backward", "float32", "mul_ir")
    found = {arch: find_schedule(*kernel, representative(arch), "conv-e19-d6") for arch in ("sm_89", "sm_90", "sm_100")}
    tuned = found["sm_90"].schedule
    assert isinstance(tuned, CudaSchedule) and tuned.min_blocks and found["sm_89"].schedule == tuned
    assert found["sm_100"].schedule == dataclasses.replace(tuned, min_blocks=0)
    name = "mace-mp-first conv double_backward float32 mul_ir conv-e19-d6"
    served = next(kernel for kernel in entries_on("sm_100") if kernel.name == name)
    assert examine(served, representative("sm_100")).spill_bytes == 0


@pytest.mark.slow
def test_a_kernel_beyond_the_limits_is_found() -> None:
    facts = representative("sm_100")
    staged = next(k for k in entries_on("sm_100") if k.plan.shared_bytes > 60_000 and len(k.source.text) < 40_000)
    assert examine(staged, facts).fault == ""
    small = dataclasses.replace(facts, shared_per_block=50_000, registers_per_unit=1024)
    assert "of shared memory; a block has 50000" in examine(staged, small).fault
    assert "registers; a multiprocessor has 1024" in examine(staged, small).fault
    broken = dataclasses.replace(staged.source, text=staged.source.text + "\nint broken = ;")
    assert "does not compile" in examine(dataclasses.replace(staged, source=broken), facts).fault


@pytest.mark.slow
def test_a_sample_takes_a_kernel_of_each_kind_before_a_second_one() -> None:
    kernels = distinct(entries_on("sm_86"))
    kinds = {tuple(kernel.name.split()[1:4]) for kernel in kernels}
    few = sampled(kernels, 60)
    assert {tuple(kernel.name.split()[1:4]) for kernel in few} == kinds and len(few) == 60
    assert any(kernel.is_changed for kernel in few)


@pytest.mark.slow
def test_no_kernel_is_begun_after_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel is begun after it; they are taken as a sample would have them."""
    clock, begun = [0.0], []

    def slowly(kernel: PortableKernel, facts: DeviceFacts) -> Finding:
        clock[0] += 60.0
        begun.append((facts.arch, kernel.name))
        return Finding(kernel, registers=32)

    monkeypatch.setattr("autotune.replay.portability.examine", slowly)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "check", "--arch", "sm_80,sm_86", "--no-defaults", "--limit", "4m"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sm_")]
    assert ended.value.code == 0 and [" 2 compiled, 0 failed" in line for line in lines] == [True, True]
    taken = [("sm_80", kernel.name) for kernel in sampled(distinct(entries_on("sm_80")), 2)]
    assert begun[:2] == taken and [arch for arch, _ in begun[2:]] == ["sm_86", "sm_86"]


@pytest.mark.slow
def test_the_command_says_what_it_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "check", "--arch", "sm_86", "--sample", "2", "--no-defaults"])
    out = capsys.readouterr().out
    line, estimate = out.splitlines()
    assert ended.value.code == 0 and "estimate, not measured" in estimate and "fastest trial that is legal" in estimate
    assert (
        line.startswith(f"sm_86 (NVIDIA A10): {len(SHIPPED.by_identity)} entries, ") and "2 compiled, 0 failed" in line
    )


def test_the_command_names_the_architectures_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["db", "check", "--arch", "sm_70"])
    assert ended.value.code == 2 and "expected one of sm_80, sm_86" in capsys.readouterr().err


def test_limits_that_were_found_on_an_h200_follow_the_device() -> None:
    cards = [representative(arch) for arch in CUDA_ARCHS]
    assert [small_graph_edges(card) for card in cards] == [4096, 2048, 4096, 4096, 4096, 4096]
    assert small_graph_edges(dataclasses.replace(representative("sm_90"), units=16)) == 512, "a part of a GPU"
    assert {easy_registers(card) for card in cards} == {168}
    with pytest.raises(UnsupportedError, match="sm_75"):
        representative("sm_75")
