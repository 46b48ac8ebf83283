"""Engines of vLLM: their state, the choice of an engine for a request, and the bodies that they get."""
