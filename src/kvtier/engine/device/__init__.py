"""Everything that runs on the device: arena, forward pass, graphs, sampling."""
