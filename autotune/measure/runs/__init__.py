"""How the kernels of each kind are run: one file a kind.

In: a workload and a device. Out: tensors, float64 reference, operator, calls. Read ``base``, ``tensor_product``,
``spherical_harmonics``, ``edge_vectors``, ``radial_convolution``, ``symmetric_contraction``; ``registry`` finds them by
operation.
"""
