"""Imports e3nn, of any supported version. All files of this project take what they need of it from here.

e3nn 0.4 reads a file of constants with ``torch.load`` when it is imported. Since torch 2.6 that function refuses the
``slice`` objects in this file, unless they are declared safe. ``mace`` turns the check off for the whole process. Here
these objects alone are declared safe, and only during the import.
"""

from __future__ import annotations

import contextlib

import torch

# Torch before 2.5 has no such function, and before 2.6 it checks nothing.
_allowing = getattr(torch.serialization, "safe_globals", lambda _: contextlib.nullcontext())
with _allowing([slice]):
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet, Gate

__all__ = ["FullyConnectedNet", "Gate", "o3"]
