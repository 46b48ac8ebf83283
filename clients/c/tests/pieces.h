/* What the test programs have in common: hexadecimal digits, prompts and the bytes that belong to a hash. */
#ifndef KVT_TEST_PIECES_H
#define KVT_TEST_PIECES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"

/* `num_bytes` or nothing: the program ends with a sentence. */
static inline void *room_for(size_t num_bytes) {
    void *room = malloc(num_bytes ? num_bytes : 1);
    if (!room) {
        fprintf(stderr, "no memory\n");
        exit(2);
    }
    return room;
}

static inline unsigned digit_value(char digit) {
    return digit <= '9' ? (unsigned)(digit - '0') : (unsigned)(digit - 'a' + 10);
}

/* The bytes of hexadecimal digits, in memory of exactly that size; "-" has none. */
static inline uint8_t *from_hex(const char *digits, size_t *num_bytes) {
    *num_bytes = strcmp(digits, "-") == 0 ? 0 : strlen(digits) / 2;
    uint8_t *bytes = room_for(*num_bytes);
    for (size_t i = 0; i < *num_bytes; i++) {
        bytes[i] = (uint8_t)(digit_value(digits[2 * i]) << 4 | digit_value(digits[2 * i + 1]));
    }
    return bytes;
}

static inline void print_hex(const uint8_t *bytes, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++) {
        printf("%02x", bytes[i]);
    }
}

/* The hashes of a prompt that belongs to `seed`: all of its tokens are the seed. */
static inline uint8_t *hashes_of(const uint8_t *namespace_id, uint32_t block_tokens, uint32_t seed, size_t count) {
    size_t num_tokens = count * block_tokens;
    uint32_t *tokens = room_for(num_tokens * sizeof *tokens);
    for (size_t i = 0; i < num_tokens; i++) {
        tokens[i] = seed;
    }
    uint8_t *hashes = room_for(count * KVT_HASH_BYTES);
    kvt_hash_blocks(namespace_id, NULL, tokens, num_tokens, block_tokens, hashes);
    free(tokens);
    return hashes;
}

/* Of a program that is called with ADDRESS NAMESPACE BLOCK_BYTES BLOCK_TOKENS, something of its own, and [TOKEN]. */
static inline kvt_options options_of(int count, char **arguments, uint8_t **namespace_id) {
    size_t namespace_bytes;
    *namespace_id = from_hex(arguments[2], &namespace_bytes);
    kvt_options options;
    memset(&options, 0, sizeof options);
    options.address = arguments[1];
    options.namespace_id = *namespace_id;
    options.block_bytes = strtoull(arguments[3], NULL, 10);
    options.block_tokens = (uint32_t)strtoul(arguments[4], NULL, 10);
    if (count > 6) {
        options.token = arguments[6];
        options.token_bytes = strlen(arguments[6]);
    }
    return options;
}

/* The bytes of a block are its hash over and over: a wrong one shows. */
static inline void write_block(void *block, const uint8_t *hash, size_t block_bytes) {
    uint8_t *at = block;
    for (size_t i = 0; i < block_bytes; i++) {
        at[i] = hash[i % KVT_HASH_BYTES];
    }
}

static inline int is_right_block(const void *block, const uint8_t *hash, size_t block_bytes) {
    const uint8_t *at = block;
    for (size_t i = 0; i < block_bytes; i += KVT_HASH_BYTES) {
        size_t left = block_bytes - i < KVT_HASH_BYTES ? block_bytes - i : KVT_HASH_BYTES;
        if (memcmp(at + i, hash, left) != 0) {
            return 0;
        }
    }
    return 1;
}

#endif
