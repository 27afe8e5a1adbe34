"""The emitter of convolutions that form their edge weights in registers, by plan."""

from __future__ import annotations

from kernelgen.emit.radial.kernel import emit_radial, radial_launch
from kernelgen.emit.source import Emitter
from kernelgen.plan.radial_convolution import RadialPlan

EMITTERS = {RadialPlan: Emitter(emit_radial, radial_launch)}
