"""A plan becomes source text: the one place, with the headers of ``include/``, that holds C++ and CUDA.

In: a plan. Out: a complete source with one ``extern "C"`` function. Read ``kernel_source`` (which emitter serves a
plan), ``source`` and ``signature``, then ``host``, ``cuda``, ``pairs``, or ``harmonics`` with ``harmonics_function``.
"""
