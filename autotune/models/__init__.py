"""Whole models of MACE, NequIP and SevenNet, as their packages' users know them.

In: a model's name, file or function, and atoms. Out: energies, forces, stresses and gradients, by the package's code.
Read ``catalogue`` (published hyperparameters), ``whole_model`` (open and run a model), ``packages`` (what each package
does its own way), ``atoms`` (the structures).
"""
