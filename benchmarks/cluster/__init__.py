"""Blocks in clusters that hosts share."""
