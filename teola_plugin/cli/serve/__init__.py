"""`teola serve` and `teola key`."""
