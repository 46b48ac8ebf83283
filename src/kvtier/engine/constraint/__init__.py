"""Answers that follow a grammar: compiled beside the engine's steps, and asked which tokens may come next."""
