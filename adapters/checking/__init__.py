"""`shadow=`, whatever the framework: calls made once more by the original, and whether two answers are the same."""
