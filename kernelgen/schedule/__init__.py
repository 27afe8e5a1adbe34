"""The knobs of a kernel as data: how work is divided, never what is computed.

In: numbers and names. Out: a schedule; with problem, direction and device it makes a spec, which determines one kernel.
Read ``knobs`` (the base), the schedules (``tensor_product``, ``spherical_harmonics``, ``edge_vectors``, ``radial`` with
``radial_knobs``, ``symmetric_contraction``; the last two have their specs too), then ``kernel_spec`` (the specs of the
others).
"""
