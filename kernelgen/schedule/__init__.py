"""The knobs of a kernel as data: how work is divided, never what is computed.

In: numbers and names. Out: a schedule, and with problem, direction and device a spec, which determines one kernel.
Read ``knobs`` (the base), the schedule of a kind (``tensor_product``, ``spherical_harmonics``, ``edge_vectors``), then
``kernel_spec``.
"""
