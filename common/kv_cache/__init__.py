"""What requests keep on a device, as values (planes, pool spec, pool layout), and who holds which page. No torch."""
