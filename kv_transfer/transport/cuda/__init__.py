"""GPU memory for transports: the CUDA runtime, the kernel that moves pages, checksums on the device."""
