"""A real SGLang server that switches between speculative and plain decode while you watch."""
