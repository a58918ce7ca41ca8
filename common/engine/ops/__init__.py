"""Operations on tensors, one per file: kernel, launcher and torch reference. CPUs run the reference."""
