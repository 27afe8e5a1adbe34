"""The kinds of kernels, as far as choosing and storing schedules needs to tell them apart: one file a kind.

In: a problem, a direction and facts of a device. Out: a spec, its default schedule, its plan. Read ``base`` (what a
kind says of itself), ``tensor_product``, ``spherical_harmonics``, ``edge_vectors``; ``registry`` finds the
kinds in this folder, and one by its operation.
"""
