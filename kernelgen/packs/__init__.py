"""Packs of kernels for machines without a compiler, a cache or Python, and the library that runs them there.

In: calls of operators, from exported models or problems. Out: a file (``kernelgen.compile.pack_file``), and the shared
library with the operators ``equitune::*`` for C++ programs. Read ``calls`` (what a call needs, as data), ``exported``
(the calls of an exported model), ``sums`` (what is changed in a model before that), ``content`` (all of a pack) with
``fixed`` (kernels beside operators'), ``make``, ``recorded`` (the kernels that a process runs) and ``library``, whose
source is in ``cpp``. ``ranks`` has the operators by which programs on several ranks exchange rows.
"""
