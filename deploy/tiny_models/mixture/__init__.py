"""Two tiny models with experts: plain attention in every layer, and gated delta layers with an MTP module."""
