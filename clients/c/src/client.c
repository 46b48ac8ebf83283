/* Opening and closing clients, and the calls that move no blocks. */
#define _GNU_SOURCE
#include "client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "clock.h"

#define DEFAULT_TIMEOUT_S 1.0
#define MAX_TIMEOUT_S 86400.0
#define FIRST_RETRY_S 0.05
#define MAX_LISTED ((size_t)1 << 26) /* hashes: two gigabytes of them */
#define MAX_MOVE_BYTES ((uint64_t)256 << 20)

int kvt_protocol_version(void) {
    return KVT_VERSION;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

kvt_status kvt_leave(kvt_client *client, kvt_status status) {
    pthread_mutex_unlock(&client->lock);
    return status;
}

kvt_status kvt_enter(kvt_client *client) {
    if (client->pid != getpid()) {
        return KVT_INVALID; /* the lock may be held by a thread that is not here */
    }
    pthread_mutex_lock(&client->lock);
    if (client->setup != KVT_OK) {
        return kvt_leave(client, client->setup);
    }
    return KVT_OK;
}

kvt_status kvt_check_hashes(kvt_client *client, const uint8_t *hashes, size_t num_hashes, size_t *count) {
    *count = num_hashes < KVT_MAX_HASHES ? num_hashes : KVT_MAX_HASHES;
    if (num_hashes && !hashes) {
        return kvt_fail(&client->failure, KVT_INVALID, "there are no hashes");
    }
    if (client->num_late >= KVT_MAX_LATE) {
        return kvt_fail(&client->failure, KVT_UNAVAILABLE, "the server does not take back what was granted");
    }
    return KVT_OK;
}

kvt_status kvt_check_offsets(kvt_client *client, const uint8_t *offsets, size_t count) {
    if (!client->arena) {
        return KVT_OK; /* over TCP they mean nothing, and nothing is read there */
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t offset = kvt_number_at(offsets, i);
        if (client->block_bytes > client->arena->num_bytes ||
            offset > client->arena->num_bytes - client->block_bytes) {
            return kvt_fail(&client->failure, KVT_PROTOCOL, "the server named blocks outside its memory");
        }
    }
    return KVT_OK;
}

void kvt_copy_blocks(void *const *to, const void *const *from, size_t count, uint64_t block_bytes) {
    for (size_t start = 0; start < count;) {
        size_t end = start + 1;
        while (end < count && (end - start + 1) * block_bytes <= MAX_MOVE_BYTES &&
               (uint8_t *)to[end - 1] + block_bytes == to[end] &&
               (const uint8_t *)from[end - 1] + block_bytes == from[end]) {
            end++;
        }
        memcpy(to[start], from[start], (end - start) * block_bytes);
        start = end;
    }
}

/* --- opening ----------------------------------------------------------------------------------------------------- */

static char *copy_text(const char *text) {
    size_t length = strlen(text);
    char *copy = malloc(length + 1);
    if (copy) {
        memcpy(copy, text, length + 1);
    }
    return copy;
}

static bool is_name(const char *name) {
    size_t left = strlen(name);
    size_t num_characters = 0;
    const uint8_t *at = (const uint8_t *)name;
    while (left) {
        size_t length = kvt_character_bytes(at, left);
        if (!length || ++num_characters > 256) {
            return false;
        }
        at += length;
        left -= length;
    }
    return true;
}

static kvt_status check_options(const kvt_options *options, kvt_failure *failure) {
    if (!options->namespace_id) {
        return kvt_fail(failure, KVT_INVALID, "blocks need a namespace: set namespace_id");
    }
    if (options->block_bytes == 0 || options->block_bytes > (uint64_t)1 << 40 || options->block_bytes > SIZE_MAX / 2) {
        return kvt_fail(failure, KVT_INVALID, "block_bytes must be from 1 to 2^40");
    }
    if (options->block_tokens == 0 || options->block_tokens > (uint32_t)1 << 20) {
        return kvt_fail(failure, KVT_INVALID, "block_tokens must be from 1 to 2^20");
    }
    if (options->name && !is_name(options->name)) {
        return kvt_fail(failure, KVT_INVALID, "a name has at most 256 characters of UTF-8");
    }
    if (!(options->timeout_s >= 0 && options->timeout_s <= MAX_TIMEOUT_S)) {
        return kvt_fail(failure, KVT_INVALID, "timeout_s must be from 0 to a day");
    }
    if (options->token_bytes > KVT_MAX_TOKEN_BYTES || (options->token_bytes && !options->token)) {
        return kvt_fail(failure, KVT_INVALID, "a token has at most %d bytes", KVT_MAX_TOKEN_BYTES);
    }
    return KVT_OK;
}

static kvt_status copy_options(kvt_client *client, const kvt_options *options) {
    kvt_status status = check_options(options, &client->failure);
    if (status == KVT_OK) {
        status = kvt_parse_address(options->address, &client->address, &client->failure);
    }
    if (status != KVT_OK) {
        return status;
    }
    client->timeout_s = options->timeout_s > 0 ? options->timeout_s : DEFAULT_TIMEOUT_S;
    client->block_bytes = options->block_bytes;
    client->block_tokens = options->block_tokens;
    memcpy(client->namespace_id, options->namespace_id, KVT_NAMESPACE_BYTES);
    client->name = copy_text(options->name ? options->name : "");
    if (options->token) {
        client->token = malloc(options->token_bytes + 1);
        client->token_bytes = options->token_bytes;
        if (client->token && options->token_bytes) {
            memcpy(client->token, options->token, options->token_bytes);
        }
    }
    if (!client->name || (options->token && !client->token)) {
        return kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a client");
    }
    if (getrandom(client->holder, sizeof client->holder, 0) != (ssize_t)sizeof client->holder) {
        return kvt_fail(&client->failure, KVT_UNAVAILABLE, "the system gives no random bytes");
    }
    return KVT_OK;
}

/* A client without options; NULL without memory. */
static kvt_client *new_client(void) {
    kvt_client *made = calloc(1, sizeof *made);
    if (made) {
        pthread_mutex_init(&made->lock, NULL);
        made->pid = getpid();
        made->stream.fd = made->stream.passed_fd = KVT_NO_FD;
        made->retry_s = FIRST_RETRY_S;
        made->next_grant = 1;
        made->grants.next = made->grants.previous = &made->grants;
    }
    return made;
}

static void free_client(kvt_client *client) {
    for (size_t i = 0; i < KVT_MAX_HELPERS; i++) {
        if (client->helpers[i]) {
            free_client(client->helpers[i]);
        }
    }
    kvt_disconnect(client);
    kvt_arena_leave(client->arena);
    free(client->late);
    free(client->name);
    free(client->token);
    free(client->sent.data);
    free(client->received.data);
    free(client);
}

size_t kvt_num_helpers(void) {
    long num_quarters = sysconf(_SC_NPROCESSORS_ONLN) / 4;
    return num_quarters <= 2 ? 1 : num_quarters - 1 < KVT_MAX_HELPERS ? (size_t)num_quarters - 1 : KVT_MAX_HELPERS;
}

kvt_client *kvt_helper(kvt_client *client, size_t number) {
    if (client->helpers[number]) {
        return client->helpers[number];
    }
    kvt_client *made = new_client();
    if (!made) {
        return NULL;
    }
    made->address = client->address;
    made->timeout_s = client->timeout_s;
    made->block_bytes = client->block_bytes;
    made->block_tokens = client->block_tokens;
    memcpy(made->namespace_id, client->namespace_id, sizeof made->namespace_id);
    memcpy(made->holder, client->holder, sizeof made->holder);
    made->name = copy_text(client->name);
    made->token = client->token ? malloc(client->token_bytes + 1) : NULL;
    made->token_bytes = client->token_bytes;
    if (!made->name || (client->token && !made->token)) {
        free_client(made);
        return NULL;
    }
    if (client->token) {
        memcpy(made->token, client->token, client->token_bytes);
    }
    client->helpers[number] = made;
    return made;
}

kvt_status kvt_connect(const kvt_options *options, kvt_client **client) {
    kvt_client *made = new_client();
    *client = made;
    if (!made) {
        return KVT_NO_MEMORY;
    }
    made->setup = copy_options(made, options);
    return made->setup == KVT_OK ? kvt_ping(made) : made->setup;
}

static void say_goodbye(kvt_client *client) {
    kvt_message bye = {KVT_BYE, {{0, false, NULL, 0}}};
    kvt_message done;
    bool is_asked_for = kvt_stream_is_open(&client->stream) || client->num_late ||
                        client->grants.next != &client->grants;
    client->retry_at = 0;
    if (client->epoch && is_asked_for && kvt_begin_call(client, 0) == KVT_OK) {
        kvt_call(client, &bye, KVT_DONE, &done);
    }
}

void kvt_close(kvt_client *client) {
    if (!client) {
        return;
    }
    if (client->pid == getpid()) { /* else the server knows the parent under this holder */
        pthread_mutex_lock(&client->lock);
        if (client->setup == KVT_OK) {
            say_goodbye(client);
        }
        kvt_grants_forget(client);
        pthread_mutex_unlock(&client->lock);
        pthread_mutex_destroy(&client->lock);
    } else {
        kvt_grants_forget(client);
    }
    free_client(client);
}

const char *kvt_error(kvt_client *client) {
    static __thread char sentence[KVT_SENTENCE_BYTES];
    if (!client) {
        return "there is no memory for a client";
    }
    if (client->pid != getpid()) {
        return "this client belongs to the process that opened it: open one after the fork";
    }
    pthread_mutex_lock(&client->lock);
    memcpy(sentence, client->failure.sentence, sizeof sentence);
    pthread_mutex_unlock(&client->lock);
    return sentence;
}

bool kvt_is_local(const kvt_client *client) {
    return client->address.is_unix;
}

/* --- small calls ------------------------------------------------------------------------------------------------- */

/* A request without fields that is answered by Done. */
static kvt_status call_plainly(kvt_client *client, kvt_tag tag, uint64_t extra_bytes) {
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    kvt_message request = {tag, {{0, false, NULL, 0}}};
    kvt_message done;
    status = kvt_begin_call(client, extra_bytes);
    if (status == KVT_OK) {
        status = kvt_call(client, &request, KVT_DONE, &done);
    }
    return kvt_leave(client, status);
}

kvt_status kvt_ping(kvt_client *client) {
    return call_plainly(client, KVT_PING, 0);
}

kvt_status kvt_flush(kvt_client *client) {
    return call_plainly(client, KVT_FLUSH, (uint64_t)64000000 * 60); /* a minute more */
}

static kvt_status ask_presence(kvt_client *client, const uint8_t *hashes, size_t count, uint8_t *flags) {
    kvt_message request = {KVT_CONTAINS, {kvt_number(client->space), kvt_bytes(hashes, count * KVT_HASH_BYTES)}};
    kvt_message contained;
    kvt_status status = kvt_call(client, &request, KVT_CONTAINED, &contained);
    if (status != KVT_OK) {
        return status;
    }
    if (contained.fields[0].num_bytes != count) {
        status = kvt_fail(&client->failure, KVT_PROTOCOL, "the server answered for other blocks than it was asked for");
        return kvt_break(client, status);
    }
    for (size_t i = 0; i < count; i++) {
        flags[i] = contained.fields[0].bytes[i] != 0;
    }
    return KVT_OK;
}

kvt_status kvt_contains(kvt_client *client, const uint8_t *hashes, size_t num_hashes, uint8_t *flags) {
    if (num_hashes) {
        memset(flags, 0, num_hashes);
    }
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status == KVT_OK && count) {
        status = kvt_begin_call(client, 0);
        if (status == KVT_OK) {
            status = ask_presence(client, hashes, count, flags);
        }
    }
    return kvt_leave(client, status);
}

kvt_status kvt_drop(kvt_client *client, const uint8_t *hashes, size_t num_hashes, size_t *num_dropped) {
    *num_dropped = 0;
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status == KVT_OK && hashes && !count) {
        return kvt_leave(client, KVT_OK); /* to the server, no hashes are all of them */
    }
    if (status == KVT_OK) {
        status = kvt_begin_call(client, 0);
    }
    kvt_message request = {KVT_DROP, {kvt_number(client->space), kvt_bytes(hashes, count * KVT_HASH_BYTES)}};
    kvt_message counted;
    if (status == KVT_OK) {
        status = kvt_call(client, &request, KVT_COUNTED, &counted);
    }
    if (status == KVT_OK) {
        *num_dropped = counted.fields[0].number < SIZE_MAX ? (size_t)counted.fields[0].number : SIZE_MAX;
    }
    return kvt_leave(client, status);
}

/* --- questions --------------------------------------------------------------------------------------------------- */

uint64_t kvt_memory_bytes(kvt_client *client) {
    if (kvt_enter(client) != KVT_OK) {
        return 0;
    }
    uint64_t num_bytes = client->arena ? client->arena->num_bytes : 0;
    kvt_leave(client, KVT_OK);
    return num_bytes;
}

bool kvt_has_disk(kvt_client *client) {
    if (kvt_enter(client) != KVT_OK) {
        return false;
    }
    bool has_disk = client->has_disk;
    kvt_leave(client, KVT_OK);
    return has_disk;
}

uint64_t kvt_num_servers(kvt_client *client) {
    if (kvt_enter(client) != KVT_OK) {
        return 0;
    }
    uint64_t num_servers = client->epoch;
    kvt_leave(client, KVT_OK);
    return num_servers;
}

static kvt_status copy_document(kvt_client *client, const kvt_message *document, char **json) {
    const kvt_value *text = &document->fields[0];
    char *copy = malloc(text->num_bytes + 1);
    if (!copy) {
        return kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a document");
    }
    if (text->num_bytes) {
        memcpy(copy, text->bytes, text->num_bytes);
    }
    copy[text->num_bytes] = '\0';
    *json = copy;
    return KVT_OK;
}

kvt_status kvt_stats(kvt_client *client, char **json) {
    *json = NULL;
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    kvt_message request = {KVT_STATS, {{0, false, NULL, 0}}};
    kvt_message document;
    status = kvt_begin_call(client, 0);
    if (status == KVT_OK) {
        status = kvt_call(client, &request, KVT_DOCUMENT, &document);
    }
    if (status == KVT_OK) {
        status = copy_document(client, &document, json);
    }
    return kvt_leave(client, status);
}

/* One page of a listing, from `first` on, at the end of `found`; `*next` is 0 after the last. The lock is held. */
static kvt_status list_page(kvt_client *client, uint64_t first, kvt_buffer *found, uint64_t *next) {
    kvt_message request = {KVT_LIST, {kvt_number(client->space), kvt_number(first)}};
    kvt_message listed;
    kvt_status status = kvt_begin_call(client, 0);
    if (status == KVT_OK) {
        status = kvt_call(client, &request, KVT_LISTED, &listed);
    }
    if (status != KVT_OK) {
        return status;
    }
    const kvt_value *hashes = &listed.fields[0];
    if (found->num_bytes / KVT_HASH_BYTES > MAX_LISTED || !kvt_buffer_grow(found, hashes->num_bytes)) {
        return kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a listing");
    }
    if (hashes->num_bytes) {
        memcpy(found->data + found->num_bytes, hashes->bytes, hashes->num_bytes);
        found->num_bytes += hashes->num_bytes;
    }
    bool is_last = !hashes->num_bytes || listed.fields[2].is_negative || listed.fields[2].number <= first;
    *next = is_last ? 0 : listed.fields[2].number;
    return KVT_OK;
}

kvt_status kvt_list(kvt_client *client, uint8_t **hashes, size_t *num_hashes) {
    *hashes = NULL;
    *num_hashes = 0;
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    kvt_buffer found = {NULL, 0, 0};
    uint64_t next = 0;
    do {
        status = list_page(client, next, &found, &next);
    } while (status == KVT_OK && next);
    if (status == KVT_OK) {
        *hashes = found.data;
        *num_hashes = found.num_bytes / KVT_HASH_BYTES;
    } else {
        free(found.data);
    }
    return kvt_leave(client, status);
}
