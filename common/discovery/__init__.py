"""Finds routers that no file lists. A source gives addresses, never trust: a router has to prove its key."""
