"""The command ``equitune pack``.

In: an exported model, a problem, or a model that runs. Out: a pack of its kernels; or the library that runs packs in
C++ programs. Read ``command``, then ``of_problem`` and ``of_model``.
"""
