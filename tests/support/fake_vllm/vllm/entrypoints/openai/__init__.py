"""What vLLM says of itself."""
