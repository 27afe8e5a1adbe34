"""Where operators of harmonics that version 0.1 pickled find ``resolve_harmonics``."""

from kernelgen.ops.registry import resolve as resolve_harmonics

__all__ = ["resolve_harmonics"]
