"""Where operators that version 0.1 pickled find ``resolve``."""

from kernelgen.ops.registry import resolve

__all__ = ["resolve"]
