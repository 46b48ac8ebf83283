/* Answers lines about the wire, for a test that has the vectors: a command and its arguments in, one line out.
 *
 * Runs of bytes are hexadecimal digits, "-" for none. Every run lies in memory of exactly its size, so that an address
 * sanitizer sees each byte that is read beyond it.
 */
#define _GNU_SOURCE
#include <inttypes.h>

#include "pieces.h"
#include "sha256.h"
#include "wire.h"
#include "xxh3.h"

#define MAX_ARGUMENTS 16
#define MAX_PAYLOAD_BYTES ((uint64_t)1 << 28)

static void print_message(const kvt_message *message) {
    printf("%s", kvt_message_name((uint64_t)message->tag));
    for (size_t i = 0; i < kvt_message_num_fields(message->tag); i++) {
        const kvt_value *value = &message->fields[i];
        switch (kvt_message_field_type(message->tag, i)) {
        case KVT_INT:
            if (value->is_negative) {
                printf(" int:-%" PRIu64, ~value->number + 1);
            } else {
                printf(" int:%" PRIu64, value->number);
            }
            break;
        case KVT_BOOL:
            printf(" bool:%" PRIu64, value->number);
            break;
        case KVT_BYTES:
        case KVT_TEXT:
            printf(kvt_message_field_type(message->tag, i) == KVT_TEXT ? " text:" : " bytes:");
            print_hex(value->bytes, value->num_bytes);
            break;
        }
    }
}

static kvt_status decode_header(const uint8_t *raw, bool is_open, kvt_header *header, kvt_failure *failure) {
    return kvt_decode_header(raw, is_open ? KVT_MAX_BODY_BYTES : KVT_HANDSHAKE_BODY_BYTES,
                             is_open ? MAX_PAYLOAD_BYTES : 0, header, failure);
}

/* frame HEX: what it says, and whether it is made the same again. */
static void answer_frame(char **arguments) {
    size_t num_bytes;
    uint8_t *raw = from_hex(arguments[1], &num_bytes);
    kvt_header header;
    kvt_message message;
    kvt_failure failure;
    kvt_buffer again = {NULL, 0, 0};
    uint8_t *body = NULL;
    if (decode_header(raw, true, &header, &failure) != KVT_OK ||
        num_bytes != KVT_HEADER_BYTES + (size_t)header.body_bytes) {
        printf("error %s", failure.sentence);
    } else {
        body = room_for(header.body_bytes);
        memcpy(body, raw + KVT_HEADER_BYTES, header.body_bytes);
        if (kvt_decode(body, header.body_bytes, &message, &failure) != KVT_OK) {
            printf("error %s", failure.sentence);
        } else {
            kvt_encode_frame(&again, header.request, &message, header.payload_bytes);
            bool is_same = again.num_bytes == num_bytes && memcmp(again.data, raw, num_bytes) == 0;
            printf("%s %" PRIu32 " %" PRIu64 " ", is_same ? "same" : "other", header.request, header.payload_bytes);
            print_message(&message);
        }
    }
    free(raw);
    free(body);
    free(again.data);
}

/* body HEX: the shortest form of the message, or why it is none. */
static void answer_body(char **arguments) {
    size_t num_bytes;
    uint8_t *body = from_hex(arguments[1], &num_bytes);
    kvt_message message;
    kvt_failure failure;
    kvt_buffer again = {NULL, 0, 0};
    if (kvt_decode(body, num_bytes, &message, &failure) != KVT_OK) {
        printf("error %s", failure.sentence);
    } else {
        kvt_encode_frame(&again, 0, &message, 0);
        print_hex(again.data + KVT_HEADER_BYTES, again.num_bytes - KVT_HEADER_BYTES);
    }
    free(body);
    free(again.data);
}

/* header HEX IS_OPEN */
static void answer_header(char **arguments) {
    size_t num_bytes;
    uint8_t *raw = from_hex(arguments[1], &num_bytes);
    kvt_header header;
    kvt_failure failure;
    if (decode_header(raw, arguments[2][0] == '1', &header, &failure) == KVT_OK) {
        printf("right");
    } else {
        printf("error %s", failure.sentence);
    }
    free(raw);
}

/* hashes NAMESPACE PARENT BLOCK_TOKENS TOKENS, the tokens as little-endian u32. */
static void answer_hashes(char **arguments) {
    size_t num_bytes, parent_bytes, token_bytes;
    uint8_t *namespace_id = from_hex(arguments[1], &num_bytes);
    uint8_t *parent = from_hex(arguments[2], &parent_bytes);
    uint32_t block_tokens = (uint32_t)strtoul(arguments[3], NULL, 10);
    uint8_t *tokens = from_hex(arguments[4], &token_bytes);
    uint8_t *hashes = room_for(token_bytes / 4 / block_tokens * KVT_HASH_BYTES);
    size_t count = kvt_hash_blocks(namespace_id, parent_bytes ? parent : NULL, (const uint32_t *)(void *)tokens,
                                   token_bytes / 4, block_tokens, hashes);
    print_hex(hashes, count * KVT_HASH_BYTES);
    free(namespace_id);
    free(parent);
    free(tokens);
    free(hashes);
}

static char *text_from_hex(const char *digits) {
    size_t num_bytes;
    uint8_t *bytes = from_hex(digits, &num_bytes);
    char *text = room_for(num_bytes + 1);
    memcpy(text, bytes, num_bytes);
    text[num_bytes] = '\0';
    free(bytes);
    return text;
}

/* salted NAMESPACE SALT */
static void answer_salted(char **arguments) {
    size_t num_bytes;
    uint8_t *namespace_id = from_hex(arguments[1], &num_bytes);
    char *salt = text_from_hex(arguments[2]);
    uint8_t root[KVT_NAMESPACE_BYTES];
    kvt_salted_root(namespace_id, salt, root);
    print_hex(root, sizeof root);
    free(namespace_id);
    free(salt);
}

/* namespace LAYERS KV_HEADS HEAD_DIM BLOCK_TOKENS FIRST_LAYER and seven texts. */
static void answer_namespace(char **arguments) {
    uint32_t numbers[5];
    for (int i = 0; i < 5; i++) {
        numbers[i] = (uint32_t)strtoul(arguments[1 + i], NULL, 10);
    }
    char *texts[7];
    for (int i = 0; i < 7; i++) {
        texts[i] = text_from_hex(arguments[6 + i]);
    }
    kvt_namespace_fields fields = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], texts[0],
                                   texts[1],   texts[2],   texts[3],   texts[4],   texts[5],   texts[6]};
    uint8_t digest[KVT_NAMESPACE_BYTES];
    if (kvt_namespace(&fields, digest) == KVT_OK) {
        print_hex(digest, sizeof digest);
    } else {
        printf("error wrong fields");
    }
    for (int i = 0; i < 7; i++) {
        free(texts[i]);
    }
}

/* mac KEY TEXT */
static void answer_mac(char **arguments) {
    size_t key_bytes, num_bytes;
    uint8_t *key = from_hex(arguments[1], &key_bytes);
    uint8_t *text = from_hex(arguments[2], &num_bytes);
    uint8_t mac[KVT_SHA256_BYTES];
    kvt_hmac_sha256(key, key_bytes, text, num_bytes, mac);
    print_hex(mac, sizeof mac);
    free(key);
    free(text);
}

static uint8_t *pattern_of(size_t num_bytes) {
    uint8_t *bytes = room_for(num_bytes);
    for (size_t i = 0; i < num_bytes; i++) {
        bytes[i] = (uint8_t)(7 * i + i / 256);
    }
    return bytes;
}

static void add_in_pieces(kvt_xxh3 *sum, size_t num_bytes, size_t piece_bytes) {
    uint8_t *bytes = pattern_of(num_bytes);
    for (size_t at = 0; at < num_bytes; at += piece_bytes) {
        kvt_xxh3_add(sum, bytes + at, num_bytes - at < piece_bytes ? num_bytes - at : piece_bytes);
    }
    free(bytes);
}

/* xxh3 SEED NUM_BYTES PIECE_BYTES */
static void answer_xxh3(char **arguments) {
    kvt_xxh3 sum;
    kvt_xxh3_start(&sum, strtoull(arguments[1], NULL, 10));
    add_in_pieces(&sum, strtoul(arguments[2], NULL, 10), strtoul(arguments[3], NULL, 10));
    printf("%016" PRIx64, kvt_xxh3_end(&sum));
}

/* checksum NAMESPACE HASH NUM_BYTES */
static void answer_checksum(char **arguments) {
    size_t num_bytes;
    uint8_t *namespace_id = from_hex(arguments[1], &num_bytes);
    uint8_t *hash = from_hex(arguments[2], &num_bytes);
    kvt_xxh3 sum;
    kvt_checksum_start(&sum, namespace_id, hash);
    add_in_pieces(&sum, strtoul(arguments[3], NULL, 10), 1000);
    printf("%016" PRIx64, kvt_xxh3_end(&sum));
    free(namespace_id);
    free(hash);
}

/* What a peer would do with a frame: h header refused, s too short, b body refused, o taken. */
static char verdict_on(const uint8_t *raw, size_t num_bytes) {
    kvt_header header;
    kvt_message message;
    kvt_failure failure;
    if (num_bytes < KVT_HEADER_BYTES) {
        return 's';
    }
    if (decode_header(raw, true, &header, &failure) != KVT_OK) {
        return 'h';
    }
    if (num_bytes - KVT_HEADER_BYTES < header.body_bytes) {
        return 's';
    }
    uint8_t *body = room_for(header.body_bytes);
    memcpy(body, raw + KVT_HEADER_BYTES, header.body_bytes);
    char verdict = kvt_decode(body, header.body_bytes, &message, &failure) == KVT_OK ? 'o' : 'b';
    free(body);
    return verdict;
}

/* mutants FILE: a verdict on each of its frames, which have their length as little-endian u32 before them. */
static void answer_mutants(char **arguments) {
    FILE *file = fopen(arguments[1], "rb");
    uint8_t length[4];
    if (!file) {
        printf("error no file");
        return;
    }
    while (fread(length, 1, sizeof length, file) == sizeof length) {
        size_t num_bytes = (size_t)length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
        uint8_t *raw = room_for(num_bytes);
        if (fread(raw, 1, num_bytes, file) == num_bytes) {
            putchar(verdict_on(raw, num_bytes));
        }
        free(raw);
    }
    fclose(file);
}

static const struct {
    const char *name;
    int num_arguments;
    void (*answer)(char **arguments);
} commands[] = {
    {"frame", 1, answer_frame},   {"body", 1, answer_body},           {"header", 2, answer_header},
    {"hashes", 4, answer_hashes}, {"salted", 2, answer_salted},       {"namespace", 12, answer_namespace},
    {"mac", 2, answer_mac},       {"xxh3", 3, answer_xxh3},           {"checksum", 3, answer_checksum},
    {"mutants", 1, answer_mutants},
};

static void answer(char *line) {
    char *arguments[MAX_ARGUMENTS];
    int count = 0;
    for (char *word = strtok(line, " \n"); word && count < MAX_ARGUMENTS; word = strtok(NULL, " \n")) {
        arguments[count++] = word;
    }
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        if (count == 1 + commands[i].num_arguments && strcmp(arguments[0], commands[i].name) == 0) {
            commands[i].answer(arguments);
            return;
        }
    }
    printf("error unknown command");
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        answer(line);
        printf("\n");
        fflush(stdout);
    }
    free(line);
    return 0;
}
