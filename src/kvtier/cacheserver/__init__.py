"""The cache process: an arena, a catalog of its blocks, and the sockets to reach both. Runs without torch."""
