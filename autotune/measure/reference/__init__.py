"""The float64 values of e3nn that outputs are held to: one file a kind of kernel.

In: a workload and its tensors. Out: relative errors by output. Read ``tensor_product``, which has the base of all, then
``spherical_harmonics`` and ``edge_vectors``.
"""
