"""Compiles source to a binary on disk, with the host's C++ compiler or NVRTC; no device is needed.

In: a source and the facts of a device. Out: a cached binary with its resource usage. Read ``compiler``, then ``host``,
``nvrtc`` and ``job`` (a compiler with its flags), ``cache``, and ``pack_file`` (compiled kernels in one file,
for machines without a compiler) with ``portable``.
"""
