"""Durable key -> bytes. No sockets, no leases: who reads and when is decided above."""
