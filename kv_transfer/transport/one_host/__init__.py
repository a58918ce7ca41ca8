"""What transports between processes of one host share: shared memory segments and proof that a process ended."""
