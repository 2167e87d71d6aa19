"""Bodies of OpenAI's protocol, read and written. No I/O."""
