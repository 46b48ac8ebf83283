"""Blocks in a Mooncake Store: memory that hosts lend each other, over TCP or RDMA.

Mooncake's library runs in a process of its own beside the engine (`client_process`). Setting it up holds Python's lock
for as long as its master is silent (91 s measured), calls last 30 s when the master hangs, and a call after its end is
a segmentation fault: none of that may happen to an engine. What both processes share is memory for blocks on their
way.
"""
