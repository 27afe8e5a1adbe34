"""NequIP and Allegro.

In: a model of NequIP or Allegro. Out: the same with Equitune. Read ``package`` and ``allegro`` (what is known of them;
neither imports its package), ``patched`` (blocks as one convolution), ``extension`` (NequIP imports it: its modifier
``enable_Equitune``), ``lammps``.
"""
