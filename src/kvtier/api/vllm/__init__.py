"""Engines of vLLM: their processes, which of them gets a request, and what a body asks of them."""
