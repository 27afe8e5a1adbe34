"""Torch modules that replace e3nn's and load the best known schedules.

In: irreps and instructions, as for e3nn's modules. Out: modules with e3nn's parameters and results. Read ``base``
(lookup and build on first use, by the size of a graph), ``product``, ``convolution`` (with the base of modules whose
rows are independent, and the convolution with a radial network's last layer inside), ``harmonics``,
``symmetric_contraction``. Nothing here searches; the first run of an untuned kernel tries a few schedules
(``kernelgen.ops.first_run``).
"""
