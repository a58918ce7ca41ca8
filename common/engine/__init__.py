"""One forward pass on one device group: no queue, no socket, no scheduler. Torch starts here."""
