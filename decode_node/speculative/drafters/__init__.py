"""Where drafts come from: one protocol (drafter.py), one file for each way."""
