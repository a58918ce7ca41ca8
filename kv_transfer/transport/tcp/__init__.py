"""Any two hosts, pools on CPUs: one TCP connection per peer. The receiver can shut a sender out of every page."""
