"""What a block is: its layout, its identity, who holds it. Pure Python, no I/O, no bytes of KV."""
