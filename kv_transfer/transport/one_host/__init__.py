"""Code shared by transports between processes of one host: shared memory segments and proof of process exit."""
