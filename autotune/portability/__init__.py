"""Whether what is shipped compiles for GPUs that nobody has here, within their limits.

In: databases, configs and compute capabilities. Out: a finding for each kernel. Read ``kernels`` (which kernels a user
of such a GPU would get), ``check``.
"""
