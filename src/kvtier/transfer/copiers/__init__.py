"""Copies between a device's KV and arenas of this host. The only torch in `transfer`."""
