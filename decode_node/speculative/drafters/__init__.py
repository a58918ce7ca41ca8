"""Drafters: the protocol (drafter.py), one file per kind, and the table of algorithms (table.py)."""
