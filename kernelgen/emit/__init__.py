"""A plan becomes source text: the one place, with the headers of ``include/``, that holds C++ and CUDA.

In: a plan. Out: a complete source with one ``extern "C"`` function. Read ``kernel_source`` (finds the
emitter of a plan), ``source`` and ``signature``, then ``tensor_product`` with ``host``, ``cuda`` and ``pairs``, or
``harmonics`` with ``harmonics_function``.
"""
