"""Check outputs against e3nn in float64, one file per kind of kernel.

In: a workload and its tensors. Out: relative errors by output. Read ``tensor_product``, which has the base class, then
``spherical_harmonics``, ``edge_vectors``, ``radial_convolution`` and ``symmetric_contraction``.
"""
