"""How good untuned schedules are: fit the model of time to a device's trials, and replay it on held-out problems.

In: the packed trials of a device and its database, and those of drawn problems (``results/drawn``). Out:
``results/predicted/DEVICE.json`` (the model), ``results/replay/defaults-DEVICE.json`` (its cross-validation) and
``measured-DEVICE.json`` (choices measured since). Read ``studies``, ``fit``, ``choices``, ``comparisons``,
``evaluate``, ``peers``, ``transfer`` (to other GPUs), ``run``, ``measure``.
"""
