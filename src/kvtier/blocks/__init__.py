"""What a block is: its layout, its identity, its references. Pure Python, no I/O, no bytes of KV."""
