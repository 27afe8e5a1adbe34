"""Puts Equitune into existing models, in place, and takes it out again.

In: a model of e3nn's modules, or of a package that uses e3nn (MACE, NequIP, SevenNet, Allegro). Out: the same model
with generated kernels, and a table of what was replaced. Read ``accelerate`` (both functions), ``stand_ins`` (what
replaces e3nn's modules), ``replacement`` (how a stand-in is made and compared), ``convolution_block`` (what a package's
convolution needs), ``exchange`` (blocks with another library's convolution); ``packages/`` has one file for each
package. Users import ``mace`` or ``sevennet`` (calculators) or ``torch_sim``; ``training/`` has commands,
``lammps/`` writes files for LAMMPS, ``mace_backend/`` serves MACE version 1.
"""
