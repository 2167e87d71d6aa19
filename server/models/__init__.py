"""What answers: engines of the pool, and apps."""
