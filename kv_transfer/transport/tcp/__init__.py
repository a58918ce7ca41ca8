"""Any two hosts, pools on CPUs: one TCP connection per peer, and a fence around every page."""
