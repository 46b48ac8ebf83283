#include "xxh3.h"

#include <string.h>

#if defined(__ARM_NEON) && !defined(KVT_PLAIN)
#include <arm_neon.h>
#endif

#define STRIPE_BYTES 64
#define SECRET_STEP_BYTES 8
#define STRIPES_PER_BLOCK ((KVT_XXH3_SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP_BYTES)
#define SHORT_BYTES 240

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87U
#define PRIME64_2 0xC2B2AE3D27D4EB4FU
#define PRIME64_3 0x165667B19E3779F9U
#define PRIME64_4 0x85EBCA77C2B2AE63U
#define PRIME64_5 0x27D4EB2F165667C5U
#define PRIME_MX1 0x165667919E3779F9U
#define PRIME_MX2 0x9FB21C651E98DF25U

static const uint8_t default_secret[KVT_XXH3_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* All numbers are little-endian, whatever the machine is. */
static uint64_t read64(const uint8_t *at) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return number;
#else
    uint64_t number = 0;
    for (int i = 7; i >= 0; i--) {
        number = number << 8 | at[i];
    }
    return number;
#endif
}

static uint32_t read32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void write64(uint8_t *at, uint64_t number) {
    for (int i = 0; i < 8; i++) {
        at[i] = (uint8_t)(number >> 8 * i);
    }
}

static uint64_t rotated(uint64_t number, int bits) {
    return number << bits | number >> (64 - bits);
}

static uint32_t swapped32(uint32_t number) {
    return number >> 24 | (number >> 8 & 0xff00U) | (number & 0xff00U) << 8 | number << 24;
}

static uint64_t swapped64(uint64_t number) {
    return (uint64_t)swapped32((uint32_t)number) << 32 | swapped32((uint32_t)(number >> 32));
}

/* The halves of the 128-bit product, one on the other. */
static uint64_t folded_product(uint64_t one, uint64_t other) {
    uint64_t low = (one & 0xffffffffU) * (other & 0xffffffffU);
    uint64_t middle1 = (one >> 32) * (other & 0xffffffffU);
    uint64_t middle2 = (one & 0xffffffffU) * (other >> 32);
    uint64_t high = (one >> 32) * (other >> 32);
    uint64_t cross = (low >> 32) + (middle1 & 0xffffffffU) + middle2;
    return ((middle1 >> 32) + (cross >> 32) + high) ^ (cross << 32 | (low & 0xffffffffU));
}

static uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t avalanche_xxh64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ hash >> 32;
}

static uint64_t mixed16(const uint8_t *data, const uint8_t *secret, uint64_t seed) {
    return folded_product(read64(data) ^ (read64(secret) + seed), read64(data + 8) ^ (read64(secret + 8) - seed));
}

static uint64_t hash_to_3(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    uint32_t combined = (uint32_t)data[0] << 16 | (uint32_t)data[num_bytes >> 1] << 24 |
                        (uint32_t)data[num_bytes - 1] | (uint32_t)num_bytes << 8;
    uint64_t flipped = (uint64_t)(read32(default_secret) ^ read32(default_secret + 4)) + seed;
    return avalanche_xxh64(combined ^ flipped);
}

static uint64_t hash_to_8(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    seed ^= (uint64_t)swapped32((uint32_t)seed) << 32;
    uint64_t both = read32(data + num_bytes - 4) + ((uint64_t)read32(data) << 32);
    uint64_t hash = both ^ ((read64(default_secret + 8) ^ read64(default_secret + 16)) - seed);
    hash ^= rotated(hash, 49) ^ rotated(hash, 24);
    hash *= PRIME_MX2;
    hash ^= (hash >> 35) + num_bytes;
    hash *= PRIME_MX2;
    return hash ^ hash >> 28;
}

static uint64_t hash_to_16(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    uint64_t low = read64(data) ^ ((read64(default_secret + 24) ^ read64(default_secret + 32)) + seed);
    uint64_t high =
        read64(data + num_bytes - 8) ^ ((read64(default_secret + 40) ^ read64(default_secret + 48)) - seed);
    return avalanche(num_bytes + swapped64(low) + high + folded_product(low, high));
}

static uint64_t hash_to_128(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    uint64_t sum = num_bytes * PRIME64_1;
    for (size_t pair = (num_bytes - 1) / 32 + 1; pair-- > 0;) {
        sum += mixed16(data + 16 * pair, default_secret + 32 * pair, seed);
        sum += mixed16(data + num_bytes - 16 * (pair + 1), default_secret + 32 * pair + 16, seed);
    }
    return avalanche(sum);
}

static uint64_t hash_to_240(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    uint64_t sum = num_bytes * PRIME64_1;
    for (size_t i = 0; i < 8; i++) {
        sum += mixed16(data + 16 * i, default_secret + 16 * i, seed);
    }
    sum = avalanche(sum);
    for (size_t i = 8; i < num_bytes / 16; i++) {
        sum += mixed16(data + 16 * i, default_secret + 16 * (i - 8) + 3, seed);
    }
    sum += mixed16(data + num_bytes - 16, default_secret + 136 - 17, seed);
    return avalanche(sum);
}

static uint64_t hash_short(const uint8_t *data, size_t num_bytes, uint64_t seed) {
    if (num_bytes == 0) {
        return avalanche_xxh64(seed ^ read64(default_secret + 56) ^ read64(default_secret + 64));
    }
    if (num_bytes <= 3) {
        return hash_to_3(data, num_bytes, seed);
    }
    if (num_bytes <= 8) {
        return hash_to_8(data, num_bytes, seed);
    }
    if (num_bytes <= 16) {
        return hash_to_16(data, num_bytes, seed);
    }
    if (num_bytes <= 128) {
        return hash_to_128(data, num_bytes, seed);
    }
    return hash_to_240(data, num_bytes, seed);
}

/* Each lane gets its neighbour's number, and the product of the halves of its own key. */
#if defined(__ARM_NEON) && !defined(KVT_PLAIN) && defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
static inline void add_four(uint64_t lanes[4], const uint8_t *data, const uint8_t *secret) {
    uint64x2_t numbers0 = vreinterpretq_u64_u8(vld1q_u8(data));
    uint64x2_t numbers1 = vreinterpretq_u64_u8(vld1q_u8(data + 16));
    uint64x2_t keys0 = veorq_u64(numbers0, vreinterpretq_u64_u8(vld1q_u8(secret)));
    uint64x2_t keys1 = veorq_u64(numbers1, vreinterpretq_u64_u8(vld1q_u8(secret + 16)));
    uint32x4x2_t halves = vuzpq_u32(vreinterpretq_u32_u64(keys0), vreinterpretq_u32_u64(keys1));
    uint64x2_t sums0 = vaddq_u64(vld1q_u64(lanes), vextq_u64(numbers0, numbers0, 1));
    uint64x2_t sums1 = vaddq_u64(vld1q_u64(lanes + 2), vextq_u64(numbers1, numbers1, 1));
    vst1q_u64(lanes, vmlal_u32(sums0, vget_low_u32(halves.val[0]), vget_low_u32(halves.val[1])));
    vst1q_u64(lanes + 2, vmlal_high_u32(sums1, halves.val[0], halves.val[1]));
}
#else
static inline void add_pair(uint64_t lanes[2], const uint8_t *data, const uint8_t *secret) {
    uint64_t first = read64(data);
    uint64_t second = read64(data + 8);
    uint64_t first_key = first ^ read64(secret);
    uint64_t second_key = second ^ read64(secret + 8);
    lanes[0] += second + (first_key & 0xffffffffU) * (first_key >> 32);
    lanes[1] += first + (second_key & 0xffffffffU) * (second_key >> 32);
}

static inline void add_four(uint64_t lanes[4], const uint8_t *data, const uint8_t *secret) {
    add_pair(lanes, data, secret);
    add_pair(lanes + 2, data + 16, secret + 16);
}
#endif

/* Written out: a loop would keep the lanes in memory. */
static inline void add_stripe(uint64_t lanes[8], const uint8_t *data, const uint8_t *secret) {
    add_four(lanes, data, secret);
    add_four(lanes + 4, data + 32, secret + 32);
}

static void scramble(uint64_t lanes[8], const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t lane = lanes[i];
        lane ^= lane >> 47;
        lane ^= read64(secret + 8 * i);
        lanes[i] = lane * PRIME32_1;
    }
}

/* Stripes of one block. The lanes are copied, so that they stay in registers. */
static void add_run(uint64_t lanes[8], const uint8_t *data, const uint8_t *secret, size_t num_stripes) {
    uint64_t own[8];
    memcpy(own, lanes, sizeof own);
    for (size_t i = 0; i < num_stripes; i++) {
        add_stripe(own, data + STRIPE_BYTES * i, secret + SECRET_STEP_BYTES * i);
    }
    memcpy(lanes, own, sizeof own);
}

/* Whole stripes into `lanes`; `position` counts the stripes of the block under way. Returns the new position. */
static size_t add_stripes(uint64_t lanes[8], size_t position, const uint8_t *secret, const uint8_t *data,
                          size_t num_stripes) {
    while (num_stripes) {
        size_t left = STRIPES_PER_BLOCK - position;
        size_t count = num_stripes < left ? num_stripes : left;
        add_run(lanes, data, secret + SECRET_STEP_BYTES * position, count);
        data += STRIPE_BYTES * count;
        num_stripes -= count;
        position += count;
        if (position == STRIPES_PER_BLOCK) {
            scramble(lanes, secret + KVT_XXH3_SECRET_BYTES - STRIPE_BYTES);
            position = 0;
        }
    }
    return position;
}

void kvt_xxh3_start(kvt_xxh3 *hash, uint64_t seed) {
    static const uint64_t initial[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                        PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(hash->lanes, initial, sizeof initial);
    for (size_t i = 0; i < KVT_XXH3_SECRET_BYTES; i += 16) {
        write64(hash->secret + i, read64(default_secret + i) + seed);
        write64(hash->secret + i + 8, read64(default_secret + i + 8) - seed);
    }
    hash->num_pending = 0;
    hash->num_stripes = 0;
    hash->num_bytes = 0;
    hash->seed = seed;
}

/* Stripes that are followed by at least one more byte: the last stripe of all data is treated differently. */
static void consume(kvt_xxh3 *hash, const uint8_t *data, size_t num_stripes) {
    hash->num_stripes = add_stripes(hash->lanes, hash->num_stripes, hash->secret, data, num_stripes);
    memcpy(hash->last, data + STRIPE_BYTES * (num_stripes - 1), STRIPE_BYTES);
}

void kvt_xxh3_add(kvt_xxh3 *hash, const void *data, size_t num_bytes) {
    if (!num_bytes) {
        return;
    }
    const uint8_t *from = data;
    hash->num_bytes += num_bytes;
    if (num_bytes <= KVT_XXH3_PENDING_BYTES - hash->num_pending) {
        memcpy(hash->pending + hash->num_pending, from, num_bytes);
        hash->num_pending += num_bytes;
        return;
    }
    if (hash->num_pending) {
        size_t taken = KVT_XXH3_PENDING_BYTES - hash->num_pending;
        memcpy(hash->pending + hash->num_pending, from, taken);
        from += taken;
        num_bytes -= taken;
        consume(hash, hash->pending, KVT_XXH3_PENDING_BYTES / STRIPE_BYTES);
        hash->num_pending = 0;
    }
    if (num_bytes > KVT_XXH3_PENDING_BYTES) {
        size_t num_stripes = (num_bytes - 1) / STRIPE_BYTES;
        consume(hash, from, num_stripes);
        from += STRIPE_BYTES * num_stripes;
        num_bytes -= STRIPE_BYTES * num_stripes;
    }
    memcpy(hash->pending, from, num_bytes);
    hash->num_pending = num_bytes;
}

/* The last 64 bytes of all data. */
static void last_stripe(const kvt_xxh3 *hash, uint8_t stripe[STRIPE_BYTES]) {
    if (hash->num_pending >= STRIPE_BYTES) {
        memcpy(stripe, hash->pending + hash->num_pending - STRIPE_BYTES, STRIPE_BYTES);
        return;
    }
    size_t num_before = STRIPE_BYTES - hash->num_pending;
    memcpy(stripe, hash->last + hash->num_pending, num_before);
    memcpy(stripe + num_before, hash->pending, hash->num_pending);
}

uint64_t kvt_xxh3_end(const kvt_xxh3 *hash) {
    if (hash->num_bytes <= SHORT_BYTES) {
        return hash_short(hash->pending, (size_t)hash->num_bytes, hash->seed);
    }
    uint64_t lanes[8];
    memcpy(lanes, hash->lanes, sizeof lanes);
    if (hash->num_pending > STRIPE_BYTES) {
        add_stripes(lanes, hash->num_stripes, hash->secret, hash->pending, (hash->num_pending - 1) / STRIPE_BYTES);
    }
    uint8_t stripe[STRIPE_BYTES];
    last_stripe(hash, stripe);
    add_stripe(lanes, stripe, hash->secret + KVT_XXH3_SECRET_BYTES - STRIPE_BYTES - 7);
    uint64_t sum = hash->num_bytes * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = hash->secret + 11 + 16 * i;
        sum += folded_product(lanes[2 * i] ^ read64(secret), lanes[2 * i + 1] ^ read64(secret + 8));
    }
    return avalanche(sum);
}

void kvt_checksum_start(kvt_xxh3 *hash, const uint8_t namespace_id[32], const uint8_t block_hash[32]) {
    kvt_xxh3_start(hash, 0);
    kvt_xxh3_add(hash, namespace_id, 32);
    kvt_xxh3_add(hash, block_hash, 32);
}
