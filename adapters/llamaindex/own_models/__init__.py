"""The user's own models and stores: calls that are sure start at once, and are claimed in their place."""
