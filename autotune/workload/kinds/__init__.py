"""The kinds of kernels: what is needed to choose and store their schedules.

In: a problem, a direction and facts of a device. Out: a spec, its default schedule, its plan. Read ``base`` (the
interface), ``tensor_product``, ``harmonics`` (also of edge vectors), ``radial_convolution``, ``symmetric_contraction``;
``registry`` has the table of them, and finds one by its operation.
"""
