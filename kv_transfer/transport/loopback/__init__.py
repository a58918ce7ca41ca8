"""A transport within one process whose faults are scripted, for tests of everything above transports."""
