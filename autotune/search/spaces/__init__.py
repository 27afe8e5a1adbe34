"""The search spaces of each kind of kernel: one file a kind.

In: a workload, a direction and facts of a device. Out: a ``Space``. Read ``tensor_product``, ``spherical_harmonics``,
``edge_vectors``, ``symmetric_contraction``, ``radial_convolution``; ``registry`` finds them by operation.
"""
