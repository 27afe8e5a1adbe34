"""Torch modules that replace e3nn's and load the best known schedules.

In: irreps and instructions, as for e3nn's modules. Out: modules with e3nn's parameters and results. Read ``base``
(lookup and build on first use, by the size of a graph), ``product``, ``convolution`` (also with a radial network's
last layer inside), ``rows`` (harmonics and symmetric contractions). Nothing here searches; the first run of an untuned
kernel tries a few schedules (``kernelgen.ops.first_run``).
"""
