"""The fields of request bodies: their types, their ranges, and the rules for unknown fields."""
