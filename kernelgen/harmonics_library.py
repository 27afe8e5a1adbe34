"""Lets operators of harmonics pickled by version 0.1 load: their pickles import ``resolve_harmonics`` from here."""

from kernelgen.ops.registry import resolve as resolve_harmonics

__all__ = ["resolve_harmonics"]
