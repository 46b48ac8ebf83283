/* SHA-256 and HMAC-SHA-256, as in FIPS 180-4 and RFC 2104. */
#ifndef KVT_SHA256_H
#define KVT_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define KVT_SHA256_BYTES 32
#define KVT_SHA256_BLOCK_BYTES 64

typedef struct kvt_sha256 {
    uint32_t state[8];
    uint64_t num_bytes;
    uint8_t pending[KVT_SHA256_BLOCK_BYTES];
} kvt_sha256;

void kvt_sha256_start(kvt_sha256 *hash);
void kvt_sha256_add(kvt_sha256 *hash, const void *data, size_t num_bytes);
void kvt_sha256_end(kvt_sha256 *hash, uint8_t digest[KVT_SHA256_BYTES]);

void kvt_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t num_bytes,
                     uint8_t mac[KVT_SHA256_BYTES]);

#endif
