/* Connecting, the handshake, requests and their replies. The client's lock is held throughout. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client.h"
#include "clock.h"
#include "sha256.h"

#define FIRST_RETRY_S 0.05
#define LAST_RETRY_S 2.0
#define SLOWEST_BYTES_PER_S 64e6
#define SERVER_NAME "kvtier"
#define MAX_PAYLOAD_VECTORS 1024

void kvt_disconnect(kvt_client *client) {
    kvt_stream_close(&client->stream);
}

kvt_status kvt_break(kvt_client *client, kvt_status status) {
    kvt_disconnect(client);
    return status;
}

/* --- frames ------------------------------------------------------------------------------------------------------ */

static kvt_status send_message(kvt_client *client, uint32_t number, const kvt_message *message,
                               struct iovec *payload, size_t num_vectors) {
    uint64_t payload_bytes = 0;
    for (size_t i = 0; i < num_vectors; i++) {
        payload_bytes += payload[i].iov_len;
    }
    client->sent.num_bytes = 0;
    if (kvt_encode_frame(&client->sent, number, message, payload_bytes) != KVT_OK) {
        return kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a request");
    }
    struct iovec vectors[1 + MAX_PAYLOAD_VECTORS];
    vectors[0].iov_base = client->sent.data;
    vectors[0].iov_len = client->sent.num_bytes;
    size_t first = num_vectors < MAX_PAYLOAD_VECTORS ? num_vectors : MAX_PAYLOAD_VECTORS;
    if (first) {
        memcpy(vectors + 1, payload, first * sizeof *payload);
    }
    kvt_status status = kvt_stream_send(&client->stream, vectors, 1 + first, &client->failure);
    if (status == KVT_OK && first < num_vectors) {
        status = kvt_stream_send(&client->stream, payload + first, num_vectors - first, &client->failure);
    }
    return status;
}

static kvt_status receive_message(kvt_client *client, uint64_t max_body_bytes, uint64_t max_payload_bytes,
                                  kvt_header *header, kvt_message *message) {
    uint8_t raw[KVT_HEADER_BYTES];
    kvt_failure *failure = &client->failure;
    kvt_status status = kvt_stream_receive(&client->stream, raw, sizeof raw, failure);
    if (status == KVT_OK) {
        status = kvt_decode_header(raw, max_body_bytes, max_payload_bytes, header, failure);
    }
    if (status != KVT_OK) {
        return status;
    }
    client->received.num_bytes = 0;
    if (!kvt_buffer_grow(&client->received, header->body_bytes)) {
        return kvt_fail(failure, KVT_NO_MEMORY, "there is no memory for a reply");
    }
    status = kvt_stream_receive(&client->stream, client->received.data, header->body_bytes, failure);
    if (status != KVT_OK) {
        return status;
    }
    return kvt_decode(client->received.data, header->body_bytes, message, failure);
}

static kvt_status refused(kvt_client *client, const kvt_message *failure) {
    const kvt_value *kind = &failure->fields[KVT_FAILURE_KIND];
    const kvt_value *sentence = &failure->fields[KVT_FAILURE_SENTENCE];
    int length = sentence->num_bytes < 300 ? (int)sentence->num_bytes : 300;
    const char *text = (const char *)sentence->bytes;
    if (kind->num_bytes == 7 && memcmp(kind->bytes, "refused", 7) == 0) {
        return kvt_fail(&client->failure, KVT_REFUSED, "the cache server refused: %.*s", length, text);
    }
    if (kind->num_bytes == 4 && memcmp(kind->bytes, "full", 4) == 0) {
        return kvt_fail(&client->failure, KVT_FULL, "the cache server is full: %.*s", length, text);
    }
    return kvt_fail(&client->failure, KVT_PROTOCOL, "the cache server gave up on this connection: %.*s", length, text);
}

kvt_status kvt_send_request(kvt_client *client, const kvt_message *request, struct iovec *payload,
                            size_t num_vectors, uint32_t *number) {
    client->request = client->request == UINT32_MAX ? 1 : client->request + 1;
    *number = client->request;
    kvt_status status = send_message(client, *number, request, payload, num_vectors);
    return status == KVT_OK ? KVT_OK : kvt_break(client, status);
}

kvt_status kvt_receive_reply(kvt_client *client, uint32_t number, kvt_tag tag, kvt_message *reply,
                             kvt_header *header) {
    kvt_header own;
    kvt_header *read = header ? header : &own;
    uint64_t max_payload_bytes = header ? client->max_payload_bytes : 0;
    kvt_status status = receive_message(client, KVT_MAX_BODY_BYTES, max_payload_bytes, read, reply);
    if (status != KVT_OK) {
        return kvt_break(client, status);
    }
    if (reply->tag == KVT_FAILURE) {
        status = refused(client, reply);
        bool goes_on = status != KVT_PROTOCOL && read->request == number && read->payload_bytes == 0;
        return goes_on ? status : kvt_break(client, status);
    }
    if (read->request != number || reply->tag != tag) {
        status = kvt_fail(&client->failure, KVT_PROTOCOL, "%s does not answer the request",
                          kvt_message_name((uint64_t)reply->tag));
        return kvt_break(client, status);
    }
    return KVT_OK;
}

kvt_status kvt_call(kvt_client *client, const kvt_message *request, kvt_tag tag, kvt_message *reply) {
    uint32_t number;
    kvt_status status = kvt_send_request(client, request, NULL, 0, &number);
    return status == KVT_OK ? kvt_receive_reply(client, number, tag, reply, NULL) : status;
}

/* --- the handshake ----------------------------------------------------------------------------------------------- */

typedef struct handshake {
    uint8_t client_nonce[KVT_NONCE_BYTES];
    uint8_t server_nonce[KVT_NONCE_BYTES];
    bool is_challenged;
} handshake;

static kvt_status fill_random(void *into, size_t num_bytes, kvt_failure *failure) {
    ssize_t result;
    do {
        result = getrandom(into, num_bytes, 0);
    } while (result < 0 && errno == EINTR);
    return result == (ssize_t)num_bytes ? KVT_OK
                                        : kvt_fail(failure, KVT_UNAVAILABLE, "the system gives no random bytes");
}

static void make_proof(const kvt_client *client, const handshake *shake, const char *role,
                       uint8_t mac[KVT_SHA256_BYTES]) {
    uint8_t text[6 + 2 * KVT_NONCE_BYTES]; /* "client" and "server" have six letters */
    memcpy(text, role, 6);
    memcpy(text + 6, shake->client_nonce, KVT_NONCE_BYTES);
    memcpy(text + 6 + KVT_NONCE_BYTES, shake->server_nonce, KVT_NONCE_BYTES);
    kvt_hmac_sha256(client->token, client->token_bytes, text, sizeof text, mac);
}

/* Takes as long for equal bytes as for others. */
static bool is_same_mac(const kvt_value *found, const uint8_t expected[KVT_SHA256_BYTES]) {
    if (found->num_bytes != KVT_SHA256_BYTES) {
        return false;
    }
    unsigned difference = 0;
    for (size_t i = 0; i < KVT_SHA256_BYTES; i++) {
        difference |= (unsigned)(found->bytes[i] ^ expected[i]);
    }
    return difference == 0;
}

static kvt_status send_hello(kvt_client *client, handshake *shake) {
    kvt_status status = fill_random(shake->client_nonce, sizeof shake->client_nonce, &client->failure);
    if (status != KVT_OK) {
        return status;
    }
    kvt_message hello = {KVT_HELLO,
                         {kvt_text("libkvtier"), kvt_bytes(client->holder, sizeof client->holder),
                          kvt_bytes(shake->client_nonce, sizeof shake->client_nonce)}};
    return send_message(client, 0, &hello, NULL, 0);
}

static kvt_status answer_challenge(kvt_client *client, handshake *shake, const kvt_message *challenge) {
    if (!client->token) {
        return kvt_fail(&client->failure, KVT_REFUSED, "the cache server wants a token: set token in the options");
    }
    shake->is_challenged = true;
    memcpy(shake->server_nonce, challenge->fields[0].bytes, KVT_NONCE_BYTES);
    uint8_t mac[KVT_SHA256_BYTES];
    make_proof(client, shake, "client", mac);
    kvt_message proof = {KVT_PROOF, {kvt_bytes(mac, sizeof mac)}};
    return send_message(client, 0, &proof, NULL, 0);
}

static kvt_status check_server(kvt_client *client, const handshake *shake, const kvt_message *welcome) {
    const kvt_value *server = &welcome->fields[KVT_WELCOME_SERVER];
    if (server->num_bytes != strlen(SERVER_NAME) || memcmp(server->bytes, SERVER_NAME, server->num_bytes) != 0) {
        return kvt_fail(&client->failure, KVT_REFUSED,
                        "the cache server encrypts what it sends, which this client cannot: use TLS through a proxy");
    }
    if (welcome->fields[KVT_WELCOME_SERVER_ID].num_bytes > KVT_SERVER_ID_BYTES) {
        return kvt_fail(&client->failure, KVT_PROTOCOL, "the server's id is too long");
    }
    if (!client->token || client->address.is_unix) {
        return KVT_OK;
    }
    uint8_t expected[KVT_SHA256_BYTES];
    make_proof(client, shake, "server", expected);
    if (!shake->is_challenged || !is_same_mac(&welcome->fields[KVT_WELCOME_MAC], expected)) {
        return kvt_fail(&client->failure, KVT_REFUSED,
                        "the server did not prove that it knows the token; it may not be ours");
    }
    return KVT_OK;
}

static kvt_status shake_hands(kvt_client *client, kvt_message *welcome) {
    handshake shake;
    memset(&shake, 0, sizeof shake);
    kvt_status status = send_hello(client, &shake);
    while (status == KVT_OK) {
        kvt_header header;
        status = receive_message(client, KVT_HANDSHAKE_BODY_BYTES, 0, &header, welcome);
        if (status != KVT_OK) {
            return status;
        }
        if (welcome->tag == KVT_WELCOME) {
            return check_server(client, &shake, welcome);
        }
        if (welcome->tag == KVT_FAILURE) {
            return refused(client, welcome);
        }
        if (welcome->tag != KVT_CHALLENGE || shake.is_challenged) {
            return kvt_fail(&client->failure, KVT_PROTOCOL, "%s is out of order in a handshake",
                            kvt_message_name((uint64_t)welcome->tag));
        }
        status = answer_challenge(client, &shake, welcome);
    }
    return status;
}

/* --- a connection ------------------------------------------------------------------------------------------------ */

static bool is_known_server(const kvt_client *client, const kvt_value *id) {
    return client->epoch && client->server_id_bytes == id->num_bytes &&
           memcmp(client->server_id, id->bytes, id->num_bytes) == 0;
}

/* Map the memory of a server that answers for the first time. What another one granted is gone. */
static kvt_status meet_server(kvt_client *client, const kvt_message *welcome) {
    const kvt_value *id = &welcome->fields[KVT_WELCOME_SERVER_ID];
    if (is_known_server(client, id)) {
        return KVT_OK;
    }
    kvt_arena *arena = NULL;
    if (client->address.is_unix) {
        int fd = client->stream.passed_fd;
        if (fd == KVT_NO_FD) {
            return kvt_fail(&client->failure, KVT_PROTOCOL, "the server did not pass its memory");
        }
        client->stream.passed_fd = KVT_NO_FD;
        kvt_status status =
            kvt_arena_map(fd, welcome->fields[KVT_WELCOME_ARENA_BYTES].number, &arena, &client->failure);
        if (status != KVT_OK) {
            return status;
        }
    }
    kvt_arena_leave(client->arena);
    client->arena = arena;
    memcpy(client->server_id, id->bytes, id->num_bytes);
    client->server_id_bytes = id->num_bytes;
    client->epoch++;
    client->num_late = 0;
    return KVT_OK;
}

static kvt_status open_space(kvt_client *client) {
    kvt_message open = {KVT_OPEN,
                        {kvt_bytes(client->namespace_id, sizeof client->namespace_id), kvt_text(client->name),
                         kvt_number(client->block_bytes), kvt_number(client->block_tokens), kvt_text("")}};
    kvt_message opened;
    kvt_status status = kvt_call(client, &open, KVT_OPENED, &opened);
    if (status == KVT_OK && opened.fields[0].is_negative) {
        return kvt_fail(&client->failure, KVT_PROTOCOL, "the server numbers namespaces below zero");
    }
    client->space = status == KVT_OK ? opened.fields[0].number : 0;
    return status;
}

static kvt_status connect_now(kvt_client *client, double deadline) {
    kvt_status status = kvt_stream_open(&client->stream, &client->address, deadline, &client->failure);
    if (status != KVT_OK) {
        return status;
    }
    kvt_message welcome;
    client->stream.takes_fds = client->address.is_unix;
    status = shake_hands(client, &welcome);
    if (status == KVT_OK) {
        status = meet_server(client, &welcome);
    }
    client->stream.takes_fds = false;
    if (status == KVT_OK) {
        client->max_payload_bytes = welcome.fields[KVT_WELCOME_MAX_PAYLOAD].number;
        client->has_disk = welcome.fields[KVT_WELCOME_HAS_DISK].number != 0;
        status = open_space(client);
    }
    if (status == KVT_OK) {
        status = kvt_end_late(client);
    }
    return status == KVT_OK ? KVT_OK : kvt_break(client, status);
}

static kvt_status connect_again(kvt_client *client, double deadline) {
    double now = kvt_now_s();
    if (now < client->retry_at) {
        return kvt_fail(&client->failure, KVT_UNAVAILABLE, "the cache server is down; it is tried again soon");
    }
    kvt_status status = connect_now(client, deadline);
    if (status == KVT_OK) {
        client->retry_s = FIRST_RETRY_S;
        return KVT_OK;
    }
    client->retry_at = kvt_now_s() + client->retry_s;
    client->retry_s = 2 * client->retry_s < LAST_RETRY_S ? 2 * client->retry_s : LAST_RETRY_S;
    return status;
}

kvt_status kvt_begin_call(kvt_client *client, uint64_t extra_bytes) {
    double deadline = kvt_now_s() + client->timeout_s + (double)extra_bytes / SLOWEST_BYTES_PER_S;
    if (kvt_stream_is_open(&client->stream) && kvt_stream_has_ended(&client->stream)) {
        kvt_disconnect(client);
    }
    if (!kvt_stream_is_open(&client->stream)) {
        return connect_again(client, deadline);
    }
    client->stream.deadline = deadline;
    return KVT_OK;
}
