"""The memory of blocks: mapped arenas, and copies between them and a caller's buffers."""
