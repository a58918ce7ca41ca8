"""Everything needed to try tandem on one machine: models made here, a local cluster, the evaluation."""
