"""Blocks in a Valkey or Redis Cluster: its protocol, its slots, its shards, and what is kept under which key."""
