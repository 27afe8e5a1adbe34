"""MACE.

In: a model of MACE. Out: the same with Equitune. Read ``package`` (what is known of it; never imports it), ``patched``
(its blocks as one convolution), ``use`` (calculator, LAMMPS), ``train`` (its training command), ``backend`` (Equitune
as a kernel backend of MACE version 1, which finds it by the entry point ``mace.kernel_backends.torch``; read of
``mace_core``: its contract 1.0, before its first release).
"""
