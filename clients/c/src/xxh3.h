/* XXH3 with 64 bits, as its specification says, for data that comes in pieces. */
#ifndef KVT_XXH3_H
#define KVT_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define KVT_XXH3_SECRET_BYTES 192
#define KVT_XXH3_PENDING_BYTES 256

typedef struct kvt_xxh3 {
    uint64_t lanes[8];
    uint8_t secret[KVT_XXH3_SECRET_BYTES];
    uint8_t pending[KVT_XXH3_PENDING_BYTES]; /* what is not in the lanes yet; never empty once it was full */
    uint8_t last[64];                        /* the end of what went into the lanes */
    size_t num_pending;
    size_t num_stripes; /* of the block under way */
    uint64_t num_bytes;
    uint64_t seed;
} kvt_xxh3;

void kvt_xxh3_start(kvt_xxh3 *hash, uint64_t seed);
void kvt_xxh3_add(kvt_xxh3 *hash, const void *data, size_t num_bytes);
uint64_t kvt_xxh3_end(const kvt_xxh3 *hash);

/* The checksum of a block that begins with its key: start it, then add the block's bytes. */
void kvt_checksum_start(kvt_xxh3 *hash, const uint8_t namespace_id[32], const uint8_t block_hash[32]);

#endif
