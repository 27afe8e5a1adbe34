"""CUDA C++ of an :class:`OwnersPlan`: two kernels in one launch (``accumulate="owners"``).

The first blocks own senders and write dF/dx; the others take runs of edges and write dF/dy and dF/dw. The device
functions of each have their own namespace. So a small graph's backward pass is a single launch, without another one
that zeroes outputs.
"""

from __future__ import annotations

from kernelgen.emit.cuda.kernel import (
    SHARED,
    KernelText,
    ask_all,
    blocks_of_runs,
    headers,
    launch_of,
    preamble,
)
from kernelgen.emit.harmonics_function import inside
from kernelgen.emit.launch import LaunchRule
from kernelgen.emit.signature import buffers_line, buffers_struct, gpu_entry
from kernelgen.emit.source import Source
from kernelgen.plan.channelwise import Plan
from kernelgen.plan.tensor_product import OwnersPlan
from kernelgen.schedule.tensor_product import CudaSchedule

_SIZES = ("num_edges", "num_in", "num_out")


def emit_owners(plan: OwnersPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    parts = [
        *(preamble(plan.spec), *headers(schedule, bool(plan.of_x.ring or plan.others.ring))),
        *(inside(plan.spec), buffers_struct()),
        *(_namespace("of_x", plan.of_x), _namespace("others", plan.others), _entry(plan)),
    ]
    return Source("\n".join(part for part in parts if part), "cuda")


def owners_launch(plan: OwnersPlan) -> LaunchRule:
    """The blocks of both parts."""
    of_x, others = launch_of(plan.of_x), launch_of(plan.others)
    shares = (*of_x.shares, *others.shares)
    return LaunchRule(of_x.threads, plan.shared_bytes, shares, of_x.fixed + others.fixed)


def _namespace(name: str, plan: Plan) -> str:
    text = KernelText(plan)
    sizes = ", ".join(f"const long long {size}" for size in _SIZES)
    head = f"DEVICE void work(const Buffers& b, Real* const shared, const int block, {sizes}) {{"
    lines = [f"namespace {name} {{", text.stage(), *text.groups(), head, *text.body("block"), "}", f"}}  // {name}", ""]
    return "\n".join(lines)


def _entry(plan: OwnersPlan) -> str:
    schedule = plan.spec.schedule
    assert isinstance(schedule, CudaSchedule)
    unit_blocks, nodes = blocks_of_runs(plan.of_x)
    lines = [
        *gpu_entry(schedule.block_size, schedule.min_blocks),
        buffers_line(),
        *(SHARED if plan.shared_bytes else ("    Real* const shared = nullptr;",)),
        *ask_all(plan.spec, plan.owner),
        f"    const int owning = {unit_blocks} * int((num_in + {nodes - 1}) / {nodes});",
        "    const int block = blockIdx.x;",
        f"    if (block < owning) of_x::work(b, shared, block, {', '.join(_SIZES)});",
        f"    else others::work(b, shared, block - owning, {', '.join(_SIZES)});",
        "}",
        "",
    ]
    return "\n".join(lines)
