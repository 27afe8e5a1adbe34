"""Equitune as a kernel backend of MACE version 1, which finds it by the entry point ``mace.kernel_backends.torch``.

In: descriptors of ``mace_core``, one for each operation of a model. Out: modules that compute them in layout ``ir_mul``
with generated kernels, and read and write MACE's canonical weights. Read ``backend`` (what is built and what is left to
MACE), ``canonical`` (the order of weights), then ``linear``, ``skip``, ``convolution`` and ``contraction``. Read of
``mace_core``: its contract 1.0, before its first release.
"""
