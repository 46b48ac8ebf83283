"""Which request computes what in which step, and in which blocks. No torch."""
