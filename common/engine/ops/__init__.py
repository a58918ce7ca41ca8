"""Operations on tensors, one per file: kernel, launcher, torch reference; the reference is the CPU path."""
