"""The light client of cache servers: no torch, no GPU, no exception for a server that died.

From the top down: `connecting` makes a client; `client` is of one server, `replicated` of several (`placement` says
where a block goes). Below a client of one server, `local` and `remote` move blocks (`server_blocks` is what they share,
`grants` are leases and reservations), and `admin` asks and orders without moving any. All of them talk to a server's
`endpoint`: `pool` and `server_connection`, `mapping`, `breaker` and `background`.
"""
