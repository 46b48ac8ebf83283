"""Named prefixes: warmed documents, and packs."""
