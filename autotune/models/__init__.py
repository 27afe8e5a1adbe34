"""Puts Equitune into existing models, in place, and takes it out again; and runs whole models as users do.

In: a model of e3nn's modules, or of a package that uses e3nn (MACE, NequIP, SevenNet, Allegro). Out: the same model
with generated kernels, and a table of what was replaced. Read ``accelerate`` (both functions), ``stand_ins`` (what
replaces e3nn's modules), ``replace`` (how a stand-in is made and compared), ``layout`` with ``linear`` and ``species``
(node features in layout ``ir_mul``), ``radial`` (radial networks that end early); ``capture`` with ``padding`` (one
step as one CUDA graph), ``step`` with ``neighbors`` (steps of moving atoms); ``whole_model`` and ``package`` (models as
their packages run them), ``torch_sim``, ``lammps``. A folder for each package has what is known of it.
"""
