"""Attention over paged KV: Triton kernels for the GPU, each with a plain-torch twin for machines without one.

Start at `attention.attend`. A layer's *cache* is `arena[:, layer]` of the arena
`(num_blocks, layers, kv_heads, block_tokens, 2 * head_dim)`: a strided view, K then V in its last dimension.
"""
