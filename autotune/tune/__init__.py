"""``equitune tune``: search the workloads of a config and publish database entries.

In: a config and a device, or a model that runs. Out: trials and entries on the disk. Read ``run``, ``settings``,
``publish``; ``model`` with ``model_passes`` tunes what a model runs, ``contribution`` is what is sent to the project.
"""
