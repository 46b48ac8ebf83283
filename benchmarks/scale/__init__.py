"""Many hosts over one Valkey cluster, simulated: a virtual clock, links that flows share, a stated cost model."""
