"""Kernels for the O(3)-equivariant tensor product: a problem and a schedule enter, a torch operator leaves.

    problem -> terms -> plan (with a schedule) -> source -> binary -> operator

    >>> from kernelgen import TensorProductProblem, build
    >>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
    >>> operator = build(problem)                       # default schedule, float32, convolution on the CPU
    >>> out = operator(x, y, w, sender, receiver)       # [num_nodes, problem.dim_out], differentiable twice
"""

from kernelgen import library as library  # registers torch.ops.equitune.*
from kernelgen.compile import compile_many, compile_source, find_host_compiler
from kernelgen.device import DeviceFacts, cuda_facts, device_facts
from kernelgen.direction import DIRECTIONS, Direction
from kernelgen.errors import (
    CompileError,
    EquituneError,
    InputError,
    LaunchError,
    ProblemError,
    ScheduleError,
    ToolMissingError,
    UnsupportedError,
)
from kernelgen.graph import EdgeOrder, check_indices, edge_order
from kernelgen.operators import Operator, build
from kernelgen.plan import Spec, default_schedule, make_plan
from kernelgen.problem import Instruction, TensorProductProblem
from kernelgen.schedule import CudaSchedule, HostSchedule, Schedule, schedule_from_dict
from kernelgen.version import GENERATOR_VERSION, __version__

__all__ = [
    *("TensorProductProblem", "Instruction", "Schedule", "CudaSchedule", "HostSchedule", "schedule_from_dict"),
    *("build", "Operator", "EdgeOrder", "edge_order", "check_indices"),
    *("Spec", "Direction", "DIRECTIONS", "make_plan", "default_schedule"),
    *("DeviceFacts", "device_facts", "cuda_facts", "compile_source", "compile_many", "find_host_compiler"),
    *("EquituneError", "ProblemError", "UnsupportedError", "ScheduleError", "InputError", "ToolMissingError"),
    *("CompileError", "LaunchError", "GENERATOR_VERSION", "__version__"),
]
