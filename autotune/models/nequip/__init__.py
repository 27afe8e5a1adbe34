"""NequIP and Allegro.

In: a model of NequIP or Allegro. Out: the same with Equitune. Read ``package`` (what is known of
them; never imports them), ``patched`` (blocks as one convolution), ``extension`` (NequIP imports it: its modifier
``enable_Equitune``), ``use`` (calculator, LAMMPS).
"""
