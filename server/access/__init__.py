"""Who asks, and what for: keys, terms within their caps, limits, admission."""
