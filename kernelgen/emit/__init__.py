"""Writes the source text of a plan: loops, memory and launch around the statements of ``kernelgen.terms``.

In: a plan. Out: a complete source with one ``extern "C"`` function, which contains its headers of ``include/``. Read
``kernel_source`` (chooses the emitter of a plan), ``source``, ``signature`` and ``launch`` (geometry as data), then
``tensor_product`` with ``host``, ``cuda`` and ``pairs``; ``radial_convolution`` with ``radial``; ``harmonics`` with
``harmonics_function``; or ``symmetric_contraction`` with ``contraction``. ``hip`` turns CUDA text into AMD's.
"""
