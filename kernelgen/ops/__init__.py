"""Differentiable torch operators: what ``kernelgen.build`` returns.

In: a problem and its schedules. Out: an operator, differentiable twice, that torch can compile and export. Read
``base`` (what all have: text, families for graphs of any size), ``library`` (a signature gives the torch ops, autograd
and function transforms) and ``harmonics``, the shortest kind; then ``symmetric_contraction`` and ``product`` with
``first_run`` (a choice of schedules) and ``autograd`` (eager calls). Products are parts of ``harmonics`` (of edge
vectors) and ``radial_convolution``. Beside convolutions, without schedules: ``node_kernels`` (matrices and gates),
``tall_products`` and ``edge_networks``.
"""
