"""Ways to capture a prompt forward whose attention stays eager: `breakable`, and `piecewise` with a compiled body."""
