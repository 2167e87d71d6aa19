"""The user's own OpenAI clients, sent over a pool engine."""
