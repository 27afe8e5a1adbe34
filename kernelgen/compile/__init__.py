"""Compiles source to a binary on disk, with the host's C++ compiler, NVRTC or clang (HIP); no device is needed.

In: a source and the facts of a device. Out: a cached binary with its resource usage. Read ``compiler``, ``job`` (a
compiler with its flags), then ``host``, ``nvrtc`` and ``hip`` with ``elf`` (what they wrote) and ``leftovers`` (what a
killed process leaves), ``cache``, and for machines without a compiler ``pack_file`` (compiled kernels in one file) with
``pack_index``, and ``shipped`` (folders of them).
"""
