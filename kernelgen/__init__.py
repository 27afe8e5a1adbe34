"""Generates kernels for O(3)-equivariant products, contractions and harmonics, as differentiable torch operators.

Each sub-package is a step and imports only those before it:

    problem -> terms -> schedule -> plan -> emit -> compile -> runtime -> ops -> packs

>>> from kernelgen import TensorProductProblem, build
>>> problem = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e", "0e+1o+2e")
>>> operator = build(problem)                       # default schedule, float32, convolution on the CPU
>>> out = operator(x, y, w, sender, receiver)       # [num_nodes, problem.dim_out], differentiable twice
"""

from kernelgen.compile.compiler import compile_many, compile_source
from kernelgen.compile.host import find_host_compiler
from kernelgen.compile.pack_file import load_pack
from kernelgen.device import DeviceFacts, cuda_facts, device_facts
from kernelgen.errors import (
    CacheError,
    CompileError,
    EquituneError,
    InputError,
    LaunchError,
    PackError,
    ProblemError,
    ScheduleError,
    ToolMissingError,
    UnsupportedError,
)
from kernelgen.ops.contraction.operator import ContractionOperator, build_contraction
from kernelgen.ops.edge_vectors import HarmonicProduct
from kernelgen.ops.family import build_family
from kernelgen.ops.harmonics_operator import HarmonicsOperator, build_harmonics
from kernelgen.ops.operator import Operator, build
from kernelgen.plan.defaults import default_schedule
from kernelgen.plan.planner import make_plan
from kernelgen.problem.connection_modes import Instruction
from kernelgen.problem.spherical_harmonics import HarmonicsProblem
from kernelgen.problem.symmetric_contraction import ContractionProblem
from kernelgen.problem.tensor_product import TensorProductProblem
from kernelgen.runtime.graph import EdgeOrder, check_indices, edge_order
from kernelgen.schedule.kernel_spec import Spec
from kernelgen.schedule.tensor_product import CudaSchedule, HostSchedule, Schedule, schedule_from_dict
from kernelgen.terms.directions import DIRECTIONS, Direction
from kernelgen.version import GENERATOR_VERSION, __version__

__all__ = [
    "CacheError",
    "CompileError",
    "ContractionOperator",
    "ContractionProblem",
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
    "PackError",
    "ProblemError",
    "Schedule",
    "ScheduleError",
    "Spec",
    "TensorProductProblem",
    "ToolMissingError",
    "UnsupportedError",
    "__version__",
    "build",
    "build_contraction",
    "build_family",
    "build_harmonics",
    "check_indices",
    "compile_many",
    "compile_source",
    "cuda_facts",
    "default_schedule",
    "device_facts",
    "edge_order",
    "find_host_compiler",
    "load_pack",
    "make_plan",
    "schedule_from_dict",
]
