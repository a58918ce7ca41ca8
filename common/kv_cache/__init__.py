"""Per-request device state as values (planes, pool spec, pool layout), and the bookkeeping of pages. No torch."""
