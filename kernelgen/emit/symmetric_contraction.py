"""A kernel of a symmetric contraction as C++ text, for GPU and host.

Both use the statements of ``kernelgen.terms.contraction_statements``. A thread of a GPU has one channel of a task's
nodes; with ir_mul neighbouring threads access neighbouring elements. A host thread takes whole nodes, and vectors of
channels; in mul_ir it changes the layout of these channels first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kernelgen.emit.contraction.gpu import GPU_ENTRY, gpu_kernel
from kernelgen.emit.contraction.host import host_kernel
from kernelgen.emit.cuda.zero_blocks import zero_blocks
from kernelgen.emit.launch import LaunchRule, Share
from kernelgen.emit.source import Emitter, Source
from kernelgen.plan.symmetric_contraction import ContractionPlan
from kernelgen.schedule.symmetric_contraction import ContractionCudaSchedule

C_TYPES = {"float32": "float", "float64": "double"}
INDICES = {"int32": "int", "int64": "long long"}


def emit_contraction(plan: ContractionPlan) -> Source:
    """The kernel of a plan; equal plans give equal text."""
    on_gpu = isinstance(plan.schedule, ContractionCudaSchedule)
    lines = [*_preamble(plan), *(gpu_kernel(plan) if on_gpu else host_kernel(plan))]
    text = "\n".join(lines) + "\n"
    return Source(text, "cuda", GPU_ENTRY) if on_gpu else Source(text, "c++")


def contraction_launch(plan: ContractionPlan) -> LaunchRule:
    """A thread for each task and channel, after those that write zeros."""
    schedule = plan.schedule
    assert isinstance(schedule, ContractionCudaSchedule)
    share = Share("tasks", (schedule.block_size,), times=plan.spec.problem.channels)
    return LaunchRule(schedule.block_size, 0, (share,), zero_blocks(schedule.zeros, schedule.block_size))


def _preamble(plan: ContractionPlan) -> Iterator[str]:
    spec, problem = plan.spec, plan.spec.problem
    yield f"// problem    {problem.key}"
    yield f"// direction  {spec.direction.text}, {spec.dtype}, {spec.layout}, {spec.index} elements"
    # One text serves all numbers of nodes a task.
    on_gpu = isinstance(spec.schedule, ContractionCudaSchedule)
    schedule = dataclasses.replace(spec.schedule, nodes_per_task=1) if on_gpu else spec.schedule
    yield f"// schedule   {schedule.key}"
    yield f"using Real = {C_TYPES[spec.dtype]};"
    yield f"using index_t = {INDICES[spec.index]};"
    yield f"constexpr int DIM_IN = {problem.dim_in}, DIM_OUT = {problem.dim_out}, CHANNELS = {problem.channels};"
    yield f"constexpr int WEIGHTS = {plan.weights};"


EMITTERS = {ContractionPlan: Emitter(emit_contraction, contraction_launch)}
