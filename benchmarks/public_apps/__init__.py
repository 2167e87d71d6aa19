"""Apps written after public tutorials, on a fake hosted model: what the bare `accelerate(app)` gains."""
