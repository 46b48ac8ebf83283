"""Builders only. The leak check comes from `kvtier.testing.leaks`."""
