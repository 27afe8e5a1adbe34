"""A config that a CPU searches in seconds: a small product on a water molecule, with any number of ``trials``."""

from __future__ import annotations

CONFIG = """
graph = "pair"
directions = ["forward"]
trials = {trials}
sampler = "random"
[problems.tiny]
in1 = "4x0e+4x1o"
in2 = "0e+1o"
filter = "0e+1o"
[graphs.pair]
cutoff = 5.0
molecule = "H2O"
"""
