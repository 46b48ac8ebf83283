"""The composition root: reads settings, opens parts, runs them."""
