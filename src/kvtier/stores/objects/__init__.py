"""Blocks in an object store (S3, GCS, Azure, a folder): segments of many blocks, each an object that never changes.

`blocks` finds, reads and writes them, through a `bucket` with deadlines; `segment_book` knows which segment a block is
in, `collector` gathers a segment's blocks until it is whole, and `index` is what stands at an object's end.
"""
