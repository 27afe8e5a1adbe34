"""Products of tall matrices, a row an edge, with small ones, and radial networks made of them.

In: float32 matrices on a GPU. Out: their product, differentiable any number of times, by tensor cores with float32's
errors. Read ``tall_matrices`` (the kernels), then ``products`` (autograd, and where torch's product is taken instead),
``silu`` (the activation), and ``networks`` (all hidden layers in one kernel).
"""
