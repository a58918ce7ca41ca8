"""What a request may say: the fields of bodies, their ranges and the rules for unknown fields."""
