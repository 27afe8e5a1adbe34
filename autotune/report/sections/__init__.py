"""The sections of a device's page; ``report/page.py`` sets their order.

In: the data of one device. Out: the markup of a section. Read ``first_screen``, ``models``, ``largest``, ``suite``
with ``suite_summary`` and ``suite_details``, ``roofline``, ``devices``, ``tuned_rows``, ``search``, ``replays``,
``method``.
"""
