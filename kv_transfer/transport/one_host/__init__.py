"""What transports between processes of one host share: shared memory segments and proof of a process's end."""
