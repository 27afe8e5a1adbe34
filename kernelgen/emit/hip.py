"""The HIP form of a GPU's kernel: its CUDA text after a header that says what CUDA's built-in names mean there.

The hand-written headers keep assembler text to ``__CUDA_ARCH__`` and have a C++ form beside it, which HIP takes: plain
loads and stores, copies to shared memory that a lane waits for, no prefetches. Labelled "compiles, emulated, not run".
"""

from __future__ import annotations

import dataclasses

from kernelgen.device import DeviceFacts
from kernelgen.emit.source import Source, included


def hip_form(source: Source, facts: DeviceFacts) -> Source:
    """A CUDA source for an AMD GPU; equal sources and waves give equal text."""
    note = f"// HIP for waves of {facts.wave} lanes: compiles, emulated, not run\n"
    text = f"{note}constexpr int WAVE = {facts.wave};\n{included('hip.hpp')}\n{source.text}"
    return dataclasses.replace(source, text=text, language="hip")
