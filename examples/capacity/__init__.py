"""How many GPUs does an app need? See docs/simulation.md."""
