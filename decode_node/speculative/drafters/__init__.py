"""Drafters: one protocol (drafter.py), one file for each kind, one table from algorithm to drafter (table.py)."""
