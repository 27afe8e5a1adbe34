"""The packages' training commands with Equitune in the model, for packages without a place to plug a model change in.

In: the arguments of the package's own command. Out: what that command writes: stock models, which need no Equitune.
Read ``mace``.
"""
