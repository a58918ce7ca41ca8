"""Transport between any two hosts with pools on CPUs: one TCP connection per peer, every page can be fenced."""
