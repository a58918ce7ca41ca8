"""Four drafts for the tiny target: their shapes, training, checkpoints, acceptance oracle and reference."""
