"""Which card an engine computes on, and how much of its memory it may take."""
