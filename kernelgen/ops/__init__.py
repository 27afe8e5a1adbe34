"""Differentiable torch operators: what ``kernelgen.build`` returns.

In: a problem and its schedules. Out: an operator, differentiable twice, that torch can compile and export. Read
``base``, ``operator`` with ``first_run`` (a choice of schedules) and ``autograd`` (eager calls), ``torch_ops`` (the ops
``equitune::tp_*`` for tracing), ``transforms`` (``torch.func``), ``registry`` (operators by their text) and ``family``
(one for each size of graph). The other kinds are in ``harmonics_operator`` with ``harmonics_ops``, ``edge_vectors``,
``radial`` and ``contraction``; ``nodes`` has kernels between convolutions.
"""
