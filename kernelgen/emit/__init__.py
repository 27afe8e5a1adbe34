"""Writes the source text of a plan. Only here, with the headers of ``include/``, is there C++ or CUDA text.

In: a plan. Out: a complete source with one ``extern "C"`` function. Read ``kernel_source`` (chooses the
emitter of a plan), ``source`` and ``signature``, then ``tensor_product`` with ``host``, ``cuda`` and ``pairs``,
``radial_convolution`` with ``radial``, or ``harmonics`` with ``harmonics_function``.
"""
