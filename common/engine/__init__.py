"""One forward pass on one device, and its capture in graphs: no queues, sockets or schedulers. Uses torch."""
