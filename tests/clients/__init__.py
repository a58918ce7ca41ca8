"""Clients that other people wrote, installed from their registries and run unmodified against a local cluster.

`python -m tests.clients` runs all of them; see docs/clients.md for what each one does and what works.
"""
