"""`shadow=`: some answers are compared with what the original says."""
