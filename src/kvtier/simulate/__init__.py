"""Simulates a cache of a given size on recorded traffic: traces, replay, costs. No torch; its only I/O is to read a
trace."""
