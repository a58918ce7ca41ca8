"""What requests keep on a device, as values (planes, pool spec, layout), and who holds which page. Imports no torch."""
