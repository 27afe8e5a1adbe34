"""A binary runs on torch tensors: loading, arguments, outputs, launches; no autograd.

In: a spec and checked tensors. Out: the outputs of one direction. Read ``kernel`` (a compiled kernel as something to
call, through ``cuda_driver`` on a GPU), ``graph`` and ``arguments`` (checked indices and operands), ``allocation``,
``runner`` (one direction) and ``calls`` (all directions of an operator). ``zero_flags`` serves kernels that write their
own zeros, ``instruction_cache`` measurements with cold code.
"""
