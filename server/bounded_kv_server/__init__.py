"""An OpenAI-compatible speech server for streams without end."""
