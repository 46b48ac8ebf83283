"""Blocks in object stores."""
