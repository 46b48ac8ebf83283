"""A page for people who look after the cache, and the JSON under `/kvtier/v1` that it is made of."""
