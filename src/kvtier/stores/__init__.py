"""Durable key -> bytes. No sockets, no leases: the layers above decide what is read and when."""
