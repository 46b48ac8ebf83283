"""The light client of a cache server: no torch, no GPU, no exception for a server that died.

From the top down: `connecting` makes a `client`. Below it, `local` and `remote` move blocks (`server_blocks` is what
they share, `grants` are leases and reservations), and `admin` asks and orders without moving any. All of them talk to
the server's `endpoint`: `pool` and `server_connection`, `mapping`, `breaker` and `background`.
"""
