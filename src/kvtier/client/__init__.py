"""The light client of cache servers: no torch, no GPU, no exception for a server that died."""
