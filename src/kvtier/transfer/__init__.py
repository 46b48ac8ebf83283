"""Moves prefixes between a device and the tiers: match, load, store. Works on tokens, hashes, block ids and pages."""
