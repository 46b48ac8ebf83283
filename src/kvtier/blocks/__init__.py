"""Blocks: their layout, their identity, their references and their eviction. Pure Python, no I/O, no KV bytes."""
