"""Kernels whose source never changes: compiled once a device, launched with numbers for arguments."""

from __future__ import annotations

from typing import Any

from kernelgen.compile.compiler import compile_source
from kernelgen.device import device_facts
from kernelgen.emit.source import Source
from kernelgen.errors import LaunchError
from kernelgen.runtime.cuda_driver import Arguments, error_name, launch_function, launch_on, load_entry


class FixedKernel:
    """The entry of a CUDA source, of ``count`` arguments of 8 bytes each; loaded at its first launch on a device."""

    def __init__(self, source: Source, count: int, threads: int) -> None:
        self.source, self.threads = source, threads
        self._arguments = Arguments(count)
        # By device: the handle, and what keeps its module loaded.
        self._loaded: dict[int, tuple[int, Any]] = {}

    def launch(self, device: int, blocks: int, *values: int) -> None:
        """Queue it on the device's current stream. LaunchError if the driver refuses."""
        loaded = self._loaded.get(device)
        if loaded is None:
            binary = compile_source(self.source, device_facts(f"cuda:{device}"))
            kernel = load_entry(binary, self.source.entry)
            loaded = self._loaded.setdefault(device, (int(kernel.handle), kernel))
        shape, packed = (blocks, self.threads, 0), self._arguments.pack(*values)
        status = launch_on(device, launch_function(), loaded[0], shape, packed)
        if status != 0:
            raise LaunchError(f"{self.source.entry} with {values} failed on cuda:{device}: {error_name(status)}")
