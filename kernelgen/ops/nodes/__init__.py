"""Kernels for what happens at nodes between two convolutions, each a single launch: host time limits small graphs.

In: node features in layout ``ir_mul`` on a GPU, without autograd. Out: linear layers and products by element
(``matrices``), gates (``gates``), and their derivatives. Read ``matrices``, then ``gates``; the kernels are in
``kernelgen/emit/include``.
"""
