"""What is asked of engines, for whom, and who may claim it."""
