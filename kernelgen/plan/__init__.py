"""Decides which schedules are legal and how a kernel divides its work.

In: a spec. Out: a plan, which emitters trust, or a ScheduleError that names the broken limit. Read ``planner``
(finds the planner of a kind), ``tensor_product`` (decides legality) with ``channelwise``, ``path_groups`` and
``l2_prefetch``, ``pairs``, ``radial_convolution`` with ``radial/``, ``spherical_harmonics``, ``symmetric_contraction``.
``defaults`` has the schedules of untuned products and harmonics; ``size_class`` is what a schedule may depend on of a
graph.
"""
