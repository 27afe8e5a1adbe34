"""Kernels for the O(3)-equivariant tensor product: a problem and a schedule enter, a torch operator leaves.

problem -> terms -> plan (with a schedule) -> source -> binary -> operator

>>> from kernelgen import TensorProductProblem, build
>>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
>>> operator = build(problem)                       # default schedule, float32, convolution on the CPU
>>> out = operator(x, y, w, sender, receiver)       # [num_nodes, problem.dim_out], differentiable twice
"""

from kernelgen.compile import compile_many, compile_source
from kernelgen.defaults import default_schedule
from kernelgen.device import DeviceFacts, cuda_facts, device_facts
from kernelgen.direction import DIRECTIONS, Direction
from kernelgen.errors import (
    CacheError,
    CompileError,
    EquituneError,
    InputError,
    LaunchError,
    ProblemError,
    ScheduleError,
    ToolMissingError,
    UnsupportedError,
)
from kernelgen.fused import HarmonicProduct
from kernelgen.graph import EdgeOrder, check_indices, edge_order
from kernelgen.harmonics import HarmonicsProblem
from kernelgen.harmonics_operators import HarmonicsOperator, build_harmonics
from kernelgen.host_compiler import find_host_compiler
from kernelgen.modes import Instruction
from kernelgen.operators import Operator, build
from kernelgen.plan import make_plan
from kernelgen.problem import TensorProductProblem
from kernelgen.schedule import CudaSchedule, HostSchedule, Schedule, schedule_from_dict
from kernelgen.spec import Spec
from kernelgen.version import GENERATOR_VERSION, __version__

__all__ = [
    "CacheError",
    "CompileError",
    "CudaSchedule",
    "DIRECTIONS",
    "DeviceFacts",
    "Direction",
    "EdgeOrder",
    "EquituneError",
    "GENERATOR_VERSION",
    "HarmonicProduct",
    "HarmonicsOperator",
    "HarmonicsProblem",
    "HostSchedule",
    "InputError",
    "Instruction",
    "LaunchError",
    "Operator",
    "ProblemError",
    "Schedule",
    "ScheduleError",
    "Spec",
    "TensorProductProblem",
    "ToolMissingError",
    "UnsupportedError",
    "__version__",
    "build",
    "build_harmonics",
    "check_indices",
    "compile_many",
    "compile_source",
    "cuda_facts",
    "default_schedule",
    "device_facts",
    "edge_order",
    "find_host_compiler",
    "make_plan",
    "schedule_from_dict",
]
