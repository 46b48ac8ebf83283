"""The cache process: an arena, a catalog of what is in it, and the sockets to reach both. Runs without torch."""
