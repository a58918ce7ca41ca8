"""Control messages as msgspec tagged unions, one file per receiver: each inbox is a type."""
