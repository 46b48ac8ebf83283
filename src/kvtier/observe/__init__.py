"""Metrics and logs. Nothing here knows what a block is."""
