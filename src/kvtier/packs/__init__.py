"""Packs: the blocks of a prefix in one file, for another cache."""
