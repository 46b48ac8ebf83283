/* Stores the blocks of a prompt in a cache server, then reads them where they lie.
 *
 *     kvtier cache-server --socket /tmp/kvtier.sock &
 *     cc prefix.c $(pkg-config --cflags --libs kvtier) -o prefix && ./prefix unix:/tmp/kvtier.sock
 */
#include <kvtier.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUM_TOKENS 100
#define BLOCK_TOKENS 16
#define NUM_BLOCKS (NUM_TOKENS / BLOCK_TOKENS)

/* Write the KV of each absent block into the server's memory. */
static kvt_status store_prompt(kvt_client *client, const uint8_t *hashes, size_t block_bytes) {
    kvt_reservation *reservation;
    size_t num_committed = 0;
    kvt_status status = kvt_reserve(client, hashes, NUM_BLOCKS, &reservation);
    if (status != KVT_OK) {
        return status;
    }
    size_t num_slots = kvt_reservation_num_slots(reservation);
    for (size_t slot = 0; slot < num_slots; slot++) {
        int value = (int)kvt_reservation_position(reservation, slot);
        memset(kvt_reservation_slot(reservation, slot), value, block_bytes); /* an engine writes its KV here */
    }
    status = kvt_commit(reservation, 0, num_slots, &num_committed);
    kvt_reservation_close(reservation);
    printf("stored %zu blocks\n", num_committed);
    return status;
}

static kvt_status read_prompt(kvt_client *client, const uint8_t *hashes) {
    kvt_lease *lease;
    const void *views[NUM_BLOCKS];
    kvt_status status = kvt_match(client, hashes, NUM_BLOCKS, &lease);
    if (status != KVT_OK) {
        return status;
    }
    size_t count = kvt_lease_num_blocks(lease);
    status = kvt_lease_views(lease, 0, count, views);
    for (size_t i = 0; status == KVT_OK && i < count; i++) {
        printf("block %zu begins with %d\n", i, *(const unsigned char *)views[i]);
    }
    kvt_lease_release(lease); /* the views end here */
    return status;
}

int main(int count, char **arguments) {
    kvt_namespace_fields fields = {0};
    fields.layers = 2;
    fields.kv_heads = 1;
    fields.head_dim = 64;
    fields.block_tokens = BLOCK_TOKENS;
    fields.dtype = "float16";
    fields.weights = "example";
    uint8_t namespace_id[KVT_NAMESPACE_BYTES];
    if (kvt_namespace(&fields, namespace_id) != KVT_OK) {
        return 2;
    }
    kvt_options options = {0};
    options.address = count > 1 ? arguments[1] : "unix:/tmp/kvtier.sock";
    options.namespace_id = namespace_id;
    options.block_bytes = kvt_block_bytes(&fields);
    options.block_tokens = BLOCK_TOKENS;
    options.name = "example";

    uint32_t tokens[NUM_TOKENS];
    uint8_t hashes[NUM_BLOCKS * KVT_HASH_BYTES];
    for (uint32_t i = 0; i < NUM_TOKENS; i++) {
        tokens[i] = 1000 + i;
    }
    kvt_hash_blocks(namespace_id, NULL, tokens, NUM_TOKENS, BLOCK_TOKENS, hashes);

    kvt_client *client;
    kvt_status status = kvt_connect(&options, &client);
    if (status == KVT_OK) {
        status = store_prompt(client, hashes, (size_t)options.block_bytes);
    }
    if (status == KVT_OK) {
        status = read_prompt(client, hashes);
    }
    if (status != KVT_OK) {
        fprintf(stderr, "%s\n", kvt_error(client));
    }
    kvt_close(client);
    return status == KVT_OK ? 0 : 1;
}
