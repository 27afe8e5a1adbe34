"""Differentiable torch operators: what ``kernelgen.build`` returns.

In: a problem and its schedules. Out: an operator that differentiates twice, compiles and exports. Read ``operator`` and
``autograd`` (eager calls), ``torch_ops`` (the ops ``equitune::tp_*`` for tracing), ``transforms`` (``torch.func``) and
``registry`` (operators by their text); ``harmonics_operator``, ``harmonics_ops`` and ``edge_vectors`` for the other
kinds.
"""
