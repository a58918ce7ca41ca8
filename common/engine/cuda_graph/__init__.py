"""Forward passes recorded once and replayed: what is captured, on which static inputs, by which backend."""
