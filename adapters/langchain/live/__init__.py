"""One accelerated call: the live query beside the plain object, and what joins it."""
