"""Linear layers whose weights are quantised."""
