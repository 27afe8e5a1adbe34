"""Runs binaries on torch tensors: loading, arguments, outputs, launches; no autograd.

In: a spec and checked tensors. Out: the outputs of one direction. Read ``kernel`` (a callable compiled kernel),
``graph`` (edges in order, once a graph), ``call`` (checked operands, memory for results; one direction,
and all directions of an operator).
"""
