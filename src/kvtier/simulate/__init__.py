"""What a cache of a given size would have done for traffic that was recorded: traces, replay, costs. No torch, no I/O
but reading a trace."""
