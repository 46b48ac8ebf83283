#include "sha256.h"

#include <string.h>

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotated(uint32_t word, int bits) {
    return word >> bits | word << (32 - bits);
}

static uint32_t read_word(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_word(uint8_t *at, uint32_t word) {
    at[0] = (uint8_t)(word >> 24);
    at[1] = (uint8_t)(word >> 16);
    at[2] = (uint8_t)(word >> 8);
    at[3] = (uint8_t)word;
}

static void schedule(uint32_t words[64], const uint8_t *block) {
    for (int i = 0; i < 16; i++) {
        words[i] = read_word(block + 4 * i);
    }
    for (int i = 16; i < 64; i++) {
        uint32_t early = words[i - 15];
        uint32_t late = words[i - 2];
        uint32_t sigma0 = rotated(early, 7) ^ rotated(early, 18) ^ early >> 3;
        uint32_t sigma1 = rotated(late, 17) ^ rotated(late, 19) ^ late >> 10;
        words[i] = words[i - 16] + sigma0 + words[i - 7] + sigma1;
    }
}

static void compress(uint32_t state[8], const uint8_t *block) {
    uint32_t words[64];
    schedule(words, block);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; i++) {
        uint32_t sum1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25);
        uint32_t choice = (e & f) ^ (~e & g);
        uint32_t first = h + sum1 + choice + round_constants[i] + words[i];
        uint32_t sum0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22);
        uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
        h = g;
        g = f;
        f = e;
        e = d + first;
        d = c;
        c = b;
        b = a;
        a = first + sum0 + majority;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
}

void kvt_sha256_start(kvt_sha256 *hash) {
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, initial, sizeof initial);
    hash->num_bytes = 0;
}

void kvt_sha256_add(kvt_sha256 *hash, const void *data, size_t num_bytes) {
    if (!num_bytes) {
        return;
    }
    const uint8_t *from = data;
    size_t num_pending = (size_t)(hash->num_bytes % KVT_SHA256_BLOCK_BYTES);
    hash->num_bytes += num_bytes;
    if (num_pending) {
        size_t room = KVT_SHA256_BLOCK_BYTES - num_pending;
        size_t taken = num_bytes < room ? num_bytes : room;
        memcpy(hash->pending + num_pending, from, taken);
        from += taken;
        num_bytes -= taken;
        if (taken < room) {
            return;
        }
        compress(hash->state, hash->pending);
    }
    for (; num_bytes >= KVT_SHA256_BLOCK_BYTES; num_bytes -= KVT_SHA256_BLOCK_BYTES) {
        compress(hash->state, from);
        from += KVT_SHA256_BLOCK_BYTES;
    }
    if (num_bytes) {
        memcpy(hash->pending, from, num_bytes);
    }
}

void kvt_sha256_end(kvt_sha256 *hash, uint8_t digest[KVT_SHA256_BYTES]) {
    static const uint8_t padding[KVT_SHA256_BLOCK_BYTES] = {0x80};
    uint64_t num_bits = hash->num_bytes * 8;
    size_t num_pending = (size_t)(hash->num_bytes % KVT_SHA256_BLOCK_BYTES);
    kvt_sha256_add(hash, padding, (num_pending < 56 ? 56 : 120) - num_pending);
    uint8_t length[8];
    write_word(length, (uint32_t)(num_bits >> 32));
    write_word(length + 4, (uint32_t)num_bits);
    kvt_sha256_add(hash, length, sizeof length);
    for (int i = 0; i < 8; i++) {
        write_word(digest + 4 * i, hash->state[i]);
    }
}

static void hash_keyed(const uint8_t pad[KVT_SHA256_BLOCK_BYTES], const void *data, size_t num_bytes,
                       uint8_t digest[KVT_SHA256_BYTES]) {
    kvt_sha256 hash;
    kvt_sha256_start(&hash);
    kvt_sha256_add(&hash, pad, KVT_SHA256_BLOCK_BYTES);
    kvt_sha256_add(&hash, data, num_bytes);
    kvt_sha256_end(&hash, digest);
}

void kvt_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t num_bytes,
                     uint8_t mac[KVT_SHA256_BYTES]) {
    uint8_t inner[KVT_SHA256_BLOCK_BYTES] = {0};
    uint8_t outer[KVT_SHA256_BLOCK_BYTES];
    if (key_bytes > sizeof inner) {
        kvt_sha256 hash;
        kvt_sha256_start(&hash);
        kvt_sha256_add(&hash, key, key_bytes);
        kvt_sha256_end(&hash, inner);
    } else if (key_bytes) {
        memcpy(inner, key, key_bytes);
    }
    for (size_t i = 0; i < sizeof inner; i++) {
        outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    uint8_t digest[KVT_SHA256_BYTES];
    hash_keyed(inner, data, num_bytes, digest);
    hash_keyed(outer, digest, sizeof digest, mac);
}
