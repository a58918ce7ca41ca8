"""The movable node: a prefill and a decode node in one process, of which one serves at a time.

It is the only process that imports both roles and captures the graphs of both; tests/architecture says so. It stands in
deploy/ because neither role's package may import the other one.
"""
