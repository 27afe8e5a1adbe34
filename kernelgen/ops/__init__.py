"""Differentiable torch operators: what ``kernelgen.build`` returns.

In: a problem and its schedules. Out: an operator, differentiable twice, that torch can compile and export. Read
``operator`` and ``autograd`` (eager calls), ``torch_ops`` (the ops ``equitune::tp_*`` for tracing), ``transforms``
(``torch.func``) and ``registry`` (operators by their text). The other kinds are in ``harmonics_operator``,
``harmonics_ops`` and ``edge_vectors``.
"""
