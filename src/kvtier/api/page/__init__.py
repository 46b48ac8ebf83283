"""A web page for operators of the cache, and its JSON under `/kvtier/v1`."""
