"""Metrics and logs. No module here depends on what a block is."""
