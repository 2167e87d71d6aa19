"""The user's own models and retrievers: called early, at most once, with the events of the plain call."""
