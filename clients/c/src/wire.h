/* Frames and messages as docs/protocol.md has them. Owns no socket; every length is checked before it is used. */
#ifndef KVT_WIRE_H
#define KVT_WIRE_H

#include "failure.h"

#define KVT_VERSION 3
#define KVT_HEADER_BYTES 24
#define KVT_HANDSHAKE_BODY_BYTES 4096
#define KVT_MAX_BODY_BYTES (16 << 20)
#define KVT_HOLDER_BYTES 16
#define KVT_NONCE_BYTES 16
#define KVT_MAX_FIELDS 7

typedef enum kvt_tag {
    KVT_HELLO = 1,
    KVT_CHALLENGE = 2,
    KVT_PROOF = 3,
    KVT_WELCOME = 4,
    KVT_OPEN = 10,
    KVT_MATCH = 11,
    KVT_RESERVE = 12,
    KVT_GET = 13,
    KVT_CONTAINS = 14,
    KVT_PIN = 15,
    KVT_DROP = 16,
    KVT_RELEASE = 17,
    KVT_FILL = 18,
    KVT_COMMIT = 19,
    KVT_CLOSE = 20,
    KVT_FLUSH = 21,
    KVT_INFO = 22,
    KVT_STATS = 23,
    KVT_PING = 24,
    KVT_BYE = 25,
    KVT_AWAIT = 26,
    KVT_LIST = 27,
    KVT_VERIFY = 28,
    KVT_PRESENCE = 29,
    KVT_NOTE = 30,
    KVT_NOTED = 31,
    KVT_SPACES = 32,
    KVT_SUSPECT = 33,
    KVT_PLACE = 34,
    KVT_RETAIN = 35,
    KVT_MISS_CURVE = 37,
    KVT_OPENED = 40,
    KVT_MATCHED = 41,
    KVT_RESERVED = 42,
    KVT_BLOCKS = 43,
    KVT_CONTAINED = 44,
    KVT_COUNTED = 45,
    KVT_DONE = 46,
    KVT_DOCUMENT = 47,
    KVT_FAILURE = 48,
    KVT_LISTED = 49,
    KVT_SHARED_MATCH = 50,
    KVT_RETAINED = 51
} kvt_tag;

typedef enum kvt_type { KVT_INT, KVT_BOOL, KVT_BYTES, KVT_TEXT } kvt_type;

/* One field of a message. Its maker owns bytes and texts: a decoded field points into the body. */
typedef struct kvt_value {
    uint64_t number; /* of a negative number, its two's complement; of a boolean 0 or 1 */
    bool is_negative;
    const uint8_t *bytes;
    size_t num_bytes;
} kvt_value;

typedef struct kvt_message {
    kvt_tag tag;
    kvt_value fields[KVT_MAX_FIELDS];
} kvt_message;

typedef struct kvt_header {
    uint32_t request;
    uint32_t body_bytes;
    uint64_t payload_bytes;
} kvt_header;

/* Bytes that grow; free() `data`. */
typedef struct kvt_buffer {
    uint8_t *data;
    size_t num_bytes;
    size_t capacity;
} kvt_buffer;

/* A field's place in its message, for those that the client reads. */
enum {
    KVT_WELCOME_SERVER = 0,
    KVT_WELCOME_SERVER_ID = 1,
    KVT_WELCOME_MAC = 2,
    KVT_WELCOME_ARENA_BYTES = 3,
    KVT_WELCOME_MAX_PAYLOAD = 4,
    KVT_WELCOME_HAS_DISK = 5,
    KVT_MATCHED_OFFSETS = 0,
    KVT_MATCHED_ENDED = 1,
    KVT_MATCHED_NUM_READY = 2,
    KVT_MATCHED_NUM_STORED = 3,
    KVT_RESERVED_POSITIONS = 0,
    KVT_RESERVED_OFFSETS = 1,
    KVT_RESERVED_NUM_READY = 2,
    KVT_RESERVED_NUM_PENDING = 3,
    KVT_RESERVED_NUM_REFUSED = 4,
    KVT_RESERVED_REASON = 5,
    KVT_BLOCKS_FIRST = 0,
    KVT_BLOCKS_COUNT = 1,
    KVT_BLOCKS_IS_LAST = 2,
    KVT_BLOCKS_CHECKSUMS = 3,
    KVT_FAILURE_KIND = 0,
    KVT_FAILURE_SENTENCE = 1
};

/* The name of a message, or NULL for an unknown tag. */
const char *kvt_message_name(uint64_t tag);

/* How many fields a message has, and the type of one of them. */
size_t kvt_message_num_fields(kvt_tag tag);
kvt_type kvt_message_field_type(kvt_tag tag, size_t field);

kvt_value kvt_number(uint64_t number);
kvt_value kvt_truth(bool is_true);
kvt_value kvt_bytes(const void *bytes, size_t num_bytes);
kvt_value kvt_text(const char *text);

/* The number at a place of a run of little-endian u64. */
uint64_t kvt_number_at(const uint8_t *run, size_t position);

/* The ending of a match by its word; the word is one that kvt_decode() has let through. */
kvt_ending kvt_ending_of(const kvt_value *word);

/* A frame: header and body at the end of `buffer`; the sender appends the payload. KVT_NO_MEMORY is all that fails. */
kvt_status kvt_encode_frame(kvt_buffer *buffer, uint32_t request, const kvt_message *message,
                            uint64_t payload_bytes);

/* KVT_PROTOCOL for a header that no peer of ours sends, or one over the limits. */
kvt_status kvt_decode_header(const uint8_t raw[KVT_HEADER_BYTES], uint64_t max_body_bytes,
                             uint64_t max_payload_bytes, kvt_header *header, kvt_failure *failure);

/* KVT_PROTOCOL for anything that is not exactly one known message with the values it may have. */
kvt_status kvt_decode(const uint8_t *body, size_t num_bytes, kvt_message *message, kvt_failure *failure);

/* The length in bytes of the character at `at` in valid UTF-8, or 0. */
size_t kvt_character_bytes(const uint8_t *at, size_t left);

/* Make room for `num_bytes` more; false if there is no memory. */
bool kvt_buffer_grow(kvt_buffer *buffer, size_t num_bytes);

#endif
