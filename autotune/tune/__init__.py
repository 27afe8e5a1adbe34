"""``equitune tune``: search the workloads of a config and publish database entries.

In: a config and a device. Out: trials and entries on the disk. Read ``run``, ``settings``, ``budget``,
``worker_pairs``, ``publish``; ``multi_device`` starts a tuner on each device, ``recheck`` measures entries again,
``progress`` shows the state of a search, ``contribution`` is what is sent to the project.
"""
