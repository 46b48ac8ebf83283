"""A prefix between a device and the tiers: matched, loaded, stored. Knows tokens, hashes, block ids and pages."""
