"""What must hold of an LLM engine on any hardware."""
