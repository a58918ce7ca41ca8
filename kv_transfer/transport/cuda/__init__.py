"""GPU memory as transports use it: the CUDA runtime, the kernel that moves pages, checksums on the device."""
