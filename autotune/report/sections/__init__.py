"""The sections of a device's page; ``report/page.py`` sets their order.

In: the data of one device. Out: the markup of a section. Read ``overview``, ``suite`` with ``suite_tiles`` and
``suite_details``, ``tuned_rows``, ``search``, ``replays``, ``method``.
"""
