"""Lets operators pickled by version 0.1 load: their pickles import ``resolve`` from here."""

from kernelgen.ops.registry import resolve

__all__ = ["resolve"]
