"""The router's process and its children: turns of the event loop, freed memory, processes that are started."""
