"""Torch modules that replace e3nn's and load the best known schedules.

In: irreps and instructions, as for e3nn's modules. Out: modules with e3nn's parameters and results. Read ``base``
(lookup and build on first use), ``tensor_product`` with ``e3nn_interface`` and ``matrix_contraction``,
``tensor_product_conv``, ``sizes`` (schedules by the size of a graph), ``tuned_rows`` (the same for independent rows),
``spherical_harmonics``, ``symmetric_contraction``, ``spherical_harmonics_conv``, ``radial``, ``e3nn_products``. Nothing
here searches; the first run of an untuned kernel tries a few schedules (``kernelgen.ops.first_run``).
"""
