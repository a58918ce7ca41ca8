"""A transport within one process with scripted faults, for tests of everything above transports."""
