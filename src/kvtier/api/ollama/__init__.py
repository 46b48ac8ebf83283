"""Ollama's API: routes, requests, responses."""
