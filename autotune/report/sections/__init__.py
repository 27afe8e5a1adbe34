"""The sections of a device's page, one file each, in the order in which ``report/page.py`` puts them.

In: the data of one device. Out: the markup of a section. Read ``overview``, ``suite`` with ``suite_tiles`` and
``suite_details``, ``tuned_rows``, ``search``, ``replays``, ``method``.
"""
