"""Models for LAMMPS on any number of ranks, without Python: ``kernelgen/packs/cpp/pair_equitune.cpp`` runs them.

In: a model of MACE, NequIP, Allegro or SevenNet. Out: a ``.pt2`` file of AOTInductor with the accelerated model and its
forces. Read ``compiled`` (what a rank knows, and how a model's energies become a file), then ``mace``, ``nequip`` or
``sevennet``, each with ``compile_for_lammps``: they call the package as LAMMPS's ML-IAP does.
"""
