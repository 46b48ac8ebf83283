"""Prefixes that have names: which blocks they are, where those are, and how they get into the cache."""
