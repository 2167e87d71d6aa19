"""LangChain Runnables as workflow templates."""
