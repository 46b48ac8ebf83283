/* Identity: block hashes, salted roots and namespaces. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtier.h"
#include "sha256.h"
#include "wire.h"
#include "xxh3.h"

#define FORMAT_VERSION 1

static const struct {
    const char *name;
    unsigned bytes;
} dtypes[] = {{"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}};

static void add_tokens(kvt_sha256 *hash, const uint32_t *tokens, size_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    kvt_sha256_add(hash, tokens, 4 * count);
#else
    for (size_t i = 0; i < count; i++) {
        uint8_t raw[4] = {(uint8_t)tokens[i], (uint8_t)(tokens[i] >> 8), (uint8_t)(tokens[i] >> 16),
                          (uint8_t)(tokens[i] >> 24)};
        kvt_sha256_add(hash, raw, sizeof raw);
    }
#endif
}

size_t kvt_hash_blocks(const uint8_t namespace_id[KVT_NAMESPACE_BYTES], const uint8_t *parent, const uint32_t *tokens,
                       size_t num_tokens, uint32_t block_tokens, uint8_t *hashes) {
    if (!block_tokens) {
        return 0;
    }
    size_t count = num_tokens / block_tokens;
    const uint8_t *last = parent ? parent : namespace_id;
    for (size_t i = 0; i < count; i++) {
        kvt_sha256 hash;
        kvt_sha256_start(&hash);
        kvt_sha256_add(&hash, last, KVT_HASH_BYTES);
        add_tokens(&hash, tokens + i * block_tokens, block_tokens);
        kvt_sha256_end(&hash, hashes + i * KVT_HASH_BYTES);
        last = hashes + i * KVT_HASH_BYTES;
    }
    return count;
}

void kvt_salted_root(const uint8_t namespace_id[KVT_NAMESPACE_BYTES], const char *salt,
                     uint8_t root[KVT_NAMESPACE_BYTES]) {
    static const char salted[] = "salted root";
    if (!salt || !*salt) {
        memmove(root, namespace_id, KVT_NAMESPACE_BYTES);
        return;
    }
    kvt_sha256 hash;
    kvt_sha256_start(&hash);
    kvt_sha256_add(&hash, salted, sizeof salted - 1);
    kvt_sha256_add(&hash, namespace_id, KVT_NAMESPACE_BYTES);
    kvt_sha256_add(&hash, salt, strlen(salt));
    kvt_sha256_end(&hash, root);
}

static unsigned bytes_of_dtype(const char *name) {
    for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return dtypes[i].bytes;
        }
    }
    return 0;
}

uint64_t kvt_block_bytes(const kvt_namespace_fields *fields) {
    const uint64_t most = (uint64_t)1 << 40;
    uint64_t total = 2 * (uint64_t)bytes_of_dtype(fields->dtype);
    const uint32_t factors[] = {fields->layers, fields->kv_heads, fields->head_dim, fields->block_tokens};
    for (size_t i = 0; i < sizeof factors / sizeof factors[0]; i++) {
        if (!factors[i] || total > most / factors[i]) {
            return 0;
        }
        total *= factors[i];
    }
    return total;
}

static void add_text(kvt_sha256 *hash, const char *text) {
    kvt_sha256_add(hash, text, strlen(text));
}

static void add_number(kvt_sha256 *hash, const char *key, uint32_t number) {
    char text[64];
    snprintf(text, sizeof text, "\"%s\":%" PRIu32, key, number);
    add_text(hash, text);
}

static void add_escape(kvt_sha256 *hash, uint32_t unit) {
    char text[8];
    snprintf(text, sizeof text, "\\u%04" PRIx32, unit & 0xffff);
    add_text(hash, text);
}

static void add_character(kvt_sha256 *hash, uint32_t code) {
    static const struct {
        uint32_t code;
        const char *text;
    } short_forms[] = {{'"', "\\\""},  {'\\', "\\\\"}, {'\n', "\\n"}, {'\r', "\\r"},
                       {'\t', "\\t"}, {'\b', "\\b"},  {'\f', "\\f"}};
    for (size_t i = 0; i < sizeof short_forms / sizeof short_forms[0]; i++) {
        if (short_forms[i].code == code) {
            add_text(hash, short_forms[i].text);
            return;
        }
    }
    if (code >= 0x10000) {
        add_escape(hash, 0xd800 + ((code - 0x10000) >> 10));
        add_escape(hash, 0xdc00 + ((code - 0x10000) & 0x3ff));
    } else if (code < 0x20 || code > 0x7e) {
        add_escape(hash, code);
    } else {
        uint8_t byte = (uint8_t)code;
        kvt_sha256_add(hash, &byte, 1);
    }
}

/* As Python's json writes a text, all but ASCII escaped. False for what is not UTF-8. */
static bool add_string(kvt_sha256 *hash, const char *text) {
    const uint8_t *at = (const uint8_t *)(text ? text : "");
    size_t left = strlen((const char *)at);
    add_text(hash, "\"");
    while (left) {
        size_t length = kvt_character_bytes(at, left);
        if (!length) {
            return false;
        }
        uint32_t code = length == 1 ? at[0] : at[0] & (0xffU >> (length + 1));
        for (size_t i = 1; i < length; i++) {
            code = code << 6 | (at[i] & 0x3f);
        }
        add_character(hash, code);
        at += length;
        left -= length;
    }
    add_text(hash, "\"");
    return true;
}

static bool add_named_string(kvt_sha256 *hash, const char *key, const char *text) {
    add_text(hash, "\"");
    add_text(hash, key);
    add_text(hash, "\":");
    return add_string(hash, text);
}

kvt_status kvt_tree_namespace(const char *name, uint64_t tensor_bytes, uint64_t layers,
                              uint8_t digest[KVT_NAMESPACE_BYTES]) {
    char text[64];
    kvt_sha256 hash;
    kvt_sha256_start(&hash);
    snprintf(text, sizeof text, "{\"kind\": \"vineyard\", \"layers\": %" PRIu64 ", \"name\": ", layers);
    add_text(&hash, text);
    bool is_right = add_string(&hash, name);
    snprintf(text, sizeof text, ", \"tensor_bytes\": %" PRIu64 "}", tensor_bytes);
    add_text(&hash, text);
    kvt_sha256_end(&hash, digest);
    return is_right ? KVT_OK : KVT_INVALID;
}

void kvt_digest(const kvt_run *runs, size_t num_runs, uint8_t digest[KVT_HASH_BYTES]) {
    kvt_sha256 hash;
    kvt_sha256_start(&hash);
    for (size_t i = 0; i < num_runs; i++) {
        kvt_sha256_add(&hash, runs[i].bytes, runs[i].num_bytes);
    }
    kvt_sha256_end(&hash, digest);
}

uint64_t kvt_sum(uint64_t seed, const kvt_run *runs, size_t num_runs) {
    kvt_xxh3 sum;
    kvt_xxh3_start(&sum, seed);
    for (size_t i = 0; i < num_runs; i++) {
        kvt_xxh3_add(&sum, runs[i].bytes, runs[i].num_bytes);
    }
    return kvt_xxh3_end(&sum);
}

kvt_status kvt_namespace(const kvt_namespace_fields *fields, uint8_t digest[KVT_NAMESPACE_BYTES]) {
    if (!kvt_block_bytes(fields)) {
        return KVT_INVALID;
    }
    bool has_compute_dtype = fields->compute_dtype && *fields->compute_dtype;
    kvt_sha256 hash;
    kvt_sha256_start(&hash);
    add_text(&hash, "{");
    add_number(&hash, "block_tokens", fields->block_tokens);
    add_text(&hash, ",");
    bool is_right =
        add_named_string(&hash, "compute_dtype", has_compute_dtype ? fields->compute_dtype : fields->dtype);
    add_text(&hash, ",");
    add_number(&hash, "first_layer", fields->first_layer);
    add_text(&hash, ",");
    add_number(&hash, "format", FORMAT_VERSION);
    add_text(&hash, ",");
    add_number(&hash, "head_dim", fields->head_dim);
    add_text(&hash, ",");
    is_right = add_named_string(&hash, "kv_dtype", fields->dtype) && is_right;
    add_text(&hash, ",");
    add_number(&hash, "kv_heads", fields->kv_heads);
    add_text(&hash, ",");
    add_number(&hash, "layers", fields->layers);
    add_text(&hash, ",");
    is_right = add_named_string(&hash, "lora", fields->lora) && is_right;
    add_text(&hash, ",\"model_config\":");
    add_text(&hash, fields->model_config && *fields->model_config ? fields->model_config : "{}");
    add_text(&hash, ",");
    is_right = add_named_string(&hash, "quantization", fields->quantization) && is_right;
    add_text(&hash, ",");
    is_right = add_named_string(&hash, "salt", fields->salt) && is_right;
    add_text(&hash, ",");
    is_right = add_named_string(&hash, "weights", fields->weights) && is_right;
    add_text(&hash, "}");
    kvt_sha256_end(&hash, digest);
    return is_right ? KVT_OK : KVT_INVALID;
}
