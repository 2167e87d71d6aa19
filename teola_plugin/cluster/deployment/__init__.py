"""How a shared pool comes up: the Ray head, its token, the records of what was started, engines by their specs."""
