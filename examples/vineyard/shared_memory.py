"""Vineyard's program for its radix tree in shared memory, on a kvtier cache server. Its imports have another name.

kvtier cache-server --memory 64MiB --socket /tmp/vineyard_test.sock
python -m examples.vineyard.shared_memory

It runs once on a server, as with Vineyard: its KV is random, and tokens that are cached keep the KV they have. A second
run finds the KV of the first, and says so.
"""

import numpy as np

from kvtier.vineyard import KVCache, KVTensor
from kvtier.vineyard.config import VineyardCacheConfig

vineyard_cache_config = VineyardCacheConfig(
    socket="/tmp/vineyard_test.sock",
    block_size=5,
    sync_interval=3,
    llm_cache_sync_lock="llmCacheSyncLock",
    llm_cache_object_name="llm_cache_object",
    llm_ref_cnt_object_name="llm_refcnt_object",
)
cache = KVCache(
    cache_config=vineyard_cache_config,
    tensor_bytes=16,  # should be the same as the nbytes of the tensor
    cache_capacity=10,
    layer=2,
)

tokens = [1, 2, 3, 4]
ran_before = "other KV was cached for these tokens, by an earlier run: restart the server, or name another object"

kv_tensors_to_update = []
kv_tensors = []
for _ in range(len(tokens)):
    k_tensor = np.random.rand(2, 2).astype(np.float32)
    v_tensor = np.random.rand(2, 2).astype(np.float32)
    kv_tensors.append([(k_tensor, v_tensor) for _ in range(cache.layer)])
    kv_tensors_to_update.append(
        [
            (
                KVTensor(k_tensor.ctypes.data, k_tensor.nbytes),
                KVTensor(v_tensor.ctypes.data, v_tensor.nbytes),
            )
            for _ in range(cache.layer)
        ]
    )

# insert the token list and the related kv cache list
updated = cache.update(None, tokens, kv_tensors_to_update)
assert updated == len(tokens)

kv_tensors_to_query = []
kv_tensors_from_cache = []
for _ in range(len(tokens)):
    kv_tensors_to_query.append(
        [
            (
                KVTensor(0, 0),
                KVTensor(0, 0),
            )
            for _ in range(cache.layer)
        ]
    )

matched = cache.query(tokens, kv_tensors_to_query)
kv_tensors_from_cache = kv_tensors_to_query[:matched]
assert matched == len(tokens)

assert len(kv_tensors) == len(kv_tensors_from_cache)
for kv, kv_from_cache in zip(kv_tensors, kv_tensors_from_cache, strict=True):
    assert len(kv) == len(kv_from_cache)
    for (k_tensor, v_tensor), (queried_k_tensor, queried_v_tensor) in zip(kv, kv_from_cache, strict=True):
        queried_k = np.frombuffer(
            queried_k_tensor,  # type: ignore[call-overload]
            dtype=k_tensor.dtype,
        ).reshape(k_tensor.shape)
        queried_v = np.frombuffer(
            queried_v_tensor,  # type: ignore[call-overload]
            dtype=v_tensor.dtype,
        ).reshape(v_tensor.shape)
        assert np.array_equal(k_tensor, queried_k), ran_before
        assert np.array_equal(v_tensor, queried_v), ran_before

print(f"{matched} of {len(tokens)} tokens found")
