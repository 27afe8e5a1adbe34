"""Differentiable torch operators: what ``kernelgen.build`` returns.

In: a problem and its schedules. Out: an operator, differentiable twice, that torch can compile and export. Read
``base``, ``product`` with ``first_run`` (a choice of schedules) and ``autograd`` (eager calls), ``library`` (the ops
``equitune::tp_*`` for tracing), ``transforms`` (``torch.func``) and ``family`` (one for each size of graph). The other
kinds are ``harmonics``, ``vectors`` (products with harmonics of edge vectors), ``symmetric_contraction`` and
``radial_convolution``. Beside convolutions: ``gates`` and ``node_matrices`` at nodes, ``edge_networks`` at edges.
"""
