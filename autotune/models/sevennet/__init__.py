"""SevenNet.

In: a model of SevenNet. Out: the same with Equitune. Read ``package`` (what is known of it; never imports it),
``patched`` (its blocks as one convolution), ``use`` (calculator, LAMMPS), ``train`` (its training command).
"""
