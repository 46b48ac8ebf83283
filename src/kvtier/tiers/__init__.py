"""One level of cache each, and the hierarchy over them: match, lease, fetch, offer."""
