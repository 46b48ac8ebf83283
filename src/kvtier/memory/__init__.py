"""Where bytes sit: mapped arenas, and copies between them and a caller's buffers."""
