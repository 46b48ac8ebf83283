"""The light client of a cache server: no torch, no GPU, no exception if the server has died.

From the top down: `connecting` makes a `client`. Below it, `local` and `remote` move blocks (`server_blocks` is what
they share, `grants` are leases and reservations), and `admin` sends questions and orders that move none. All of them
talk to the server's `endpoint`: `pool` and `server_connection`, `mapping`, `breaker` and `background`.
"""
