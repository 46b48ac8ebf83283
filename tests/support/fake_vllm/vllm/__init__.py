"""A package of vLLM's name with nothing in it but a server that pretends to be its own: for tests."""
