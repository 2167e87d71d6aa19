"""`bind=`: the user's own models and stores take their place on a pool's engines."""
