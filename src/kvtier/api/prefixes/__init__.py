"""Named prefixes: their blocks, where these are, and how they are put into the cache."""
