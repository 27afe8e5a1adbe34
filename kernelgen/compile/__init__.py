"""Compiles source to a binary on disk, with the host's C++ compiler, NVRTC or clang (HIP); no device is needed.

In: a source and the facts of a device. Out: a cached binary with its resource usage. Read ``compiler``
(with the cache), ``job`` (a compiler with its flags), then ``host`` and ``gpu``, and for machines without a compiler
``pack_file`` (compiled kernels in one file, and folders of them).
"""
