"""Packs of kernels for machines without a compiler, a cache or Python, and the library that runs them there.

In: calls of operators, from exported models or problems. Out: a file (``kernelgen.compile.pack_file``), and the shared
library with the operators ``equitune::*`` for C++ programs. Read ``write``
(what a call needs, as data, and from calls to a pack) and ``library``, whose source is in ``cpp``.
"""
