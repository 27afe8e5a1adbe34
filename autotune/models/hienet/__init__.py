"""HIENet.

In: a model of HIENet. Out: the same with Equitune in place of e3nn's modules. Read ``package`` (what is known of it;
never imports it).
"""
