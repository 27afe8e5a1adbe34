"""Runs binaries on torch tensors: loading, arguments, outputs, launches; no autograd.

In: a spec and checked tensors. Out: the outputs of one direction. Read ``kernel`` (a callable compiled kernel, through
``cuda_driver`` on a GPU), ``graph`` (edges in order), ``known_graphs`` (once a graph) with ``index_check``,
``arguments`` (checked operands), ``allocation``, ``runner`` (one direction) and ``calls`` (all directions of an
operator). ``zero_flags`` is for kernels that zero their outputs, ``instruction_cache`` for measurements with cold code.
"""
