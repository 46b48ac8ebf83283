"""Sockets: addresses, listening and connecting, frames over a stream, who the peer is. Used by both ends."""
