"""One forward pass on one device, and its capture in graphs: no queue, no socket, no scheduler. Torch starts here."""
