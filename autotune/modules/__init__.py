"""Torch modules that replace e3nn's and load the best known schedules.

In: irreps and instructions, as for e3nn's modules. Out: modules with e3nn's parameters and results. Read ``base``
(lookup and build on first use), ``tensor_product``, ``tuned_rows`` (the same for independent rows),
``spherical_harmonics``, ``symmetric_contraction``, ``spherical_harmonics_conv``, ``e3nn_products``. Nothing here
searches or measures.
"""
