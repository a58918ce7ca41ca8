"""The planner: watches a running cluster and changes how many nodes compute prompts and how many write answers."""
