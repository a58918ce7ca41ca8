"""Control messages as msgspec tagged unions, one file per receiver: an inbox is a type."""
