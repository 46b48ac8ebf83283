"""Sockets: addresses, listening and connecting, frames over a stream, the identity of the peer. Used by both ends."""
