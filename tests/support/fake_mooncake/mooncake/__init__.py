"""A stand-in for the package of Mooncake: see `store`."""
