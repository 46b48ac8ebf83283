#include "wire.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC 0x7469766BU
#define MAX_NAME_CHARS 256
#define MAX_ACCOUNT_CHARS 128
#define MAX_PRIORITY 100
#define MAX_TTL_S (7 * 24 * 3600)
#define MAX_LONG_CHARS 65536
#define MAX_BLOCK_BYTES ((uint64_t)1 << 40)
#define MAX_BLOCK_TOKENS ((uint64_t)1 << 20)
#define MAX_PLACE (((uint64_t)1 << 48) - 1)
#define ANY_LENGTH SIZE_MAX

/* What a field may be: a number's bounds, or a length's, of a text in characters; bytes are in whole units. */
typedef struct field_rule {
    kvt_type type;
    bool may_be_negative;
    uint64_t least;
    uint64_t most;
    size_t unit;
} field_rule;

typedef struct message_rule {
    kvt_tag tag;
    const char *name;
    size_t num_fields;
    field_rule fields[KVT_MAX_FIELDS];
} message_rule;

#define INTEGER {KVT_INT, true, 0, UINT64_MAX, 1}
#define NUMBER(least, most) {KVT_INT, false, (least), (most), 1}
#define COUNT NUMBER(0, UINT64_MAX)
#define TRUTH {KVT_BOOL, false, 0, 1, 1}
#define BYTES {KVT_BYTES, false, 0, ANY_LENGTH, 1}
#define EXACTLY(length) {KVT_BYTES, false, (length), (length), 1}
#define RUN_OF(unit) {KVT_BYTES, false, 0, ANY_LENGTH, (unit)}
#define TEXT(least, most) {KVT_TEXT, false, (least), (most), 1}
#define ANY_TEXT TEXT(0, ANY_LENGTH)

static const message_rule rules[] = {
    {KVT_HELLO, "Hello", 3, {ANY_TEXT, EXACTLY(KVT_HOLDER_BYTES), EXACTLY(KVT_NONCE_BYTES)}},
    {KVT_CHALLENGE, "Challenge", 1, {EXACTLY(KVT_NONCE_BYTES)}},
    {KVT_PROOF, "Proof", 1, {BYTES}},
    {KVT_WELCOME, "Welcome", 6, {ANY_TEXT, BYTES, BYTES, COUNT, NUMBER(1, UINT64_MAX), TRUTH}},
    {KVT_OPEN,
     "Open",
     5,
     {EXACTLY(KVT_NAMESPACE_BYTES), TEXT(0, MAX_NAME_CHARS), NUMBER(1, MAX_BLOCK_BYTES), NUMBER(1, MAX_BLOCK_TOKENS),
      TEXT(0, MAX_LONG_CHARS)}},
    {KVT_MATCH, "MatchRequest", 4, {INTEGER, RUN_OF(KVT_HASH_BYTES), INTEGER, TRUTH}},
    {KVT_RESERVE, "ReserveRequest", 3, {INTEGER, RUN_OF(KVT_HASH_BYTES), INTEGER}},
    {KVT_GET, "GetRequest", 3, {INTEGER, RUN_OF(KVT_HASH_BYTES), NUMBER(1, UINT64_MAX)}},
    {KVT_CONTAINS, "ContainsRequest", 2, {INTEGER, RUN_OF(KVT_HASH_BYTES)}},
    {KVT_PIN, "PinRequest", 3, {INTEGER, RUN_OF(KVT_HASH_BYTES), TRUTH}},
    {KVT_DROP, "DropRequest", 2, {INTEGER, RUN_OF(KVT_HASH_BYTES)}},
    {KVT_RELEASE, "Release", 1, {INTEGER}},
    {KVT_FILL, "Fill", 3, {INTEGER, COUNT, NUMBER(1, UINT64_MAX)}},
    {KVT_COMMIT, "Commit", 3, {INTEGER, COUNT, COUNT}},
    {KVT_CLOSE, "Close", 1, {INTEGER}},
    {KVT_FLUSH, "Flush", 0, {INTEGER}},
    {KVT_INFO, "InfoRequest", 0, {INTEGER}},
    {KVT_STATS, "StatsRequest", 0, {INTEGER}},
    {KVT_PING, "Ping", 0, {INTEGER}},
    {KVT_BYE, "Bye", 0, {INTEGER}},
    {KVT_AWAIT, "Await", 2, {INTEGER, COUNT}},
    {KVT_LIST, "ListRequest", 2, {INTEGER, NUMBER(0, MAX_PLACE)}},
    {KVT_VERIFY, "VerifyRequest", 2, {INTEGER, RUN_OF(KVT_HASH_BYTES)}},
    {KVT_PRESENCE, "PresenceRequest", 2, {EXACTLY(KVT_NAMESPACE_BYTES), RUN_OF(KVT_HASH_BYTES)}},
    {KVT_NOTE, "NoteRequest", 2, {TEXT(1, MAX_NAME_CHARS), TEXT(0, MAX_LONG_CHARS)}},
    {KVT_NOTED, "NotedRequest", 1, {TEXT(1, MAX_NAME_CHARS)}},
    {KVT_SPACES, "SpacesRequest", 1, {NUMBER(0, MAX_PLACE)}},
    {KVT_SUSPECT, "SuspectRequest", 2, {INTEGER, RUN_OF(KVT_HASH_BYTES)}},
    {KVT_PLACE,
     "PlaceRequest",
     4,
     {INTEGER, EXACTLY(KVT_HASH_BYTES), EXACTLY(KVT_HASH_BYTES), NUMBER(0, UINT32_MAX)}},
    {KVT_RETAIN,
     "RetainRequest",
     6,
     {INTEGER, RUN_OF(KVT_HASH_BYTES), NUMBER(0, MAX_TTL_S), NUMBER(1, MAX_PRIORITY), TEXT(0, MAX_ACCOUNT_CHARS),
      NUMBER(0, INT64_MAX)}},
    {KVT_MISS_CURVE, "MissCurveRequest", 1, {NUMBER(0, MAX_PLACE)}},
    {KVT_OPENED, "Opened", 1, {INTEGER}},
    {KVT_MATCHED, "Matched", 4, {RUN_OF(8), ANY_TEXT, COUNT, COUNT}},
    {KVT_RESERVED, "Reserved", 6, {BYTES, RUN_OF(8), COUNT, COUNT, COUNT, ANY_TEXT}},
    {KVT_BLOCKS, "Blocks", 4, {COUNT, COUNT, TRUTH, BYTES}},
    {KVT_CONTAINED, "Contained", 1, {BYTES}},
    {KVT_COUNTED, "Counted", 1, {COUNT}},
    {KVT_DONE, "Done", 0, {INTEGER}},
    {KVT_DOCUMENT, "Document", 1, {ANY_TEXT}},
    {KVT_FAILURE, "Failure", 2, {ANY_TEXT, ANY_TEXT}},
    {KVT_LISTED, "Listed", 3, {BYTES, BYTES, INTEGER}},
    {KVT_SHARED_MATCH, "SharedMatch", 5, {RUN_OF(8), ANY_TEXT, COUNT, COUNT, COUNT}},
    {KVT_RETAINED, "Retained", 3, {COUNT, NUMBER(0, MAX_TTL_S), ANY_TEXT}},
};

static const struct {
    const char *word;
    kvt_ending ending;
} endings[] = {
    {"all", KVT_ENDED_ALL},         {"miss", KVT_ENDED_NEVER_STORED}, {"evicted", KVT_ENDED_EVICTED},
    {"pending", KVT_ENDED_PENDING}, {"limit", KVT_ENDED_LIMIT},       {"down", KVT_ENDED_DOWN},
};

#define NUM_RULES (sizeof rules / sizeof rules[0])
#define NUM_ENDINGS (sizeof endings / sizeof endings[0])

static const message_rule *rule_of(uint64_t tag) {
    for (size_t i = 0; i < NUM_RULES; i++) {
        if ((uint64_t)rules[i].tag == tag) {
            return &rules[i];
        }
    }
    return NULL;
}

const char *kvt_message_name(uint64_t tag) {
    const message_rule *rule = rule_of(tag);
    return rule ? rule->name : NULL;
}

size_t kvt_message_num_fields(kvt_tag tag) {
    const message_rule *rule = rule_of((uint64_t)tag);
    return rule ? rule->num_fields : 0;
}

kvt_type kvt_message_field_type(kvt_tag tag, size_t field) {
    const message_rule *rule = rule_of((uint64_t)tag);
    return rule && field < rule->num_fields ? rule->fields[field].type : KVT_INT;
}

/* --- values ------------------------------------------------------------------------------------------------------ */

kvt_value kvt_number(uint64_t number) {
    kvt_value value = {number, false, NULL, 0};
    return value;
}

kvt_value kvt_truth(bool is_true) {
    return kvt_number(is_true ? 1 : 0);
}

kvt_value kvt_bytes(const void *bytes, size_t num_bytes) {
    kvt_value value = {0, false, bytes, num_bytes};
    return value;
}

kvt_value kvt_text(const char *text) {
    return kvt_bytes(text, strlen(text));
}

uint64_t kvt_number_at(const uint8_t *run, size_t position) {
    uint64_t number = 0;
    for (int i = 7; i >= 0; i--) {
        number = number << 8 | run[8 * position + (size_t)i];
    }
    return number;
}

static bool is_word(const kvt_value *value, const char *word) {
    return value->num_bytes == strlen(word) && memcmp(value->bytes, word, value->num_bytes) == 0;
}

static bool is_ending(const kvt_value *word) {
    for (size_t i = 0; i < NUM_ENDINGS; i++) {
        if (is_word(word, endings[i].word)) {
            return true;
        }
    }
    return false;
}

kvt_ending kvt_ending_of(const kvt_value *word) {
    for (size_t i = 0; i < NUM_ENDINGS; i++) {
        if (is_word(word, endings[i].word)) {
            return endings[i].ending;
        }
    }
    return KVT_ENDED_NEVER_STORED;
}

/* --- encoding ---------------------------------------------------------------------------------------------------- */

bool kvt_buffer_grow(kvt_buffer *buffer, size_t num_bytes) {
    if (num_bytes <= buffer->capacity - buffer->num_bytes) {
        return true;
    }
    if (num_bytes > SIZE_MAX / 2 - buffer->num_bytes) {
        return false;
    }
    size_t capacity = buffer->num_bytes + num_bytes;
    if (capacity < 2 * buffer->capacity) {
        capacity = 2 * buffer->capacity;
    }
    uint8_t *data = realloc(buffer->data, capacity);
    if (!data) {
        return false;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

static void put(kvt_buffer *buffer, const void *bytes, size_t num_bytes) {
    if (num_bytes) {
        memcpy(buffer->data + buffer->num_bytes, bytes, num_bytes);
        buffer->num_bytes += num_bytes;
    }
}

static void put_byte(kvt_buffer *buffer, unsigned byte) {
    buffer->data[buffer->num_bytes++] = (uint8_t)byte;
}

/* A code and a big-endian number of `width` bytes. */
static void put_coded(kvt_buffer *buffer, unsigned code, uint64_t number, int width) {
    put_byte(buffer, code);
    for (int i = width - 1; i >= 0; i--) {
        put_byte(buffer, (unsigned)(number >> 8 * i & 0xff));
    }
}

static void put_integer(kvt_buffer *buffer, const kvt_value *value) {
    uint64_t number = value->number;
    if (value->is_negative) {
        uint64_t magnitude = ~number; /* of -1 it is 0 */
        if (magnitude < 32) {
            put_byte(buffer, (unsigned)(number & 0xff));
        } else if (magnitude < 0x80) {
            put_coded(buffer, 0xd0, number, 1);
        } else if (magnitude < 0x8000) {
            put_coded(buffer, 0xd1, number, 2);
        } else if (magnitude < 0x80000000U) {
            put_coded(buffer, 0xd2, number, 4);
        } else {
            put_coded(buffer, 0xd3, number, 8);
        }
    } else if (number < 0x80) {
        put_byte(buffer, (unsigned)number);
    } else if (number <= 0xff) {
        put_coded(buffer, 0xcc, number, 1);
    } else if (number <= 0xffff) {
        put_coded(buffer, 0xcd, number, 2);
    } else if (number <= 0xffffffffU) {
        put_coded(buffer, 0xce, number, 4);
    } else {
        put_coded(buffer, 0xcf, number, 8);
    }
}

static void put_run(kvt_buffer *buffer, const kvt_value *value, bool is_text) {
    size_t length = value->num_bytes;
    if (is_text && length < 32) {
        put_byte(buffer, 0xa0U | (unsigned)length);
    } else if (length <= 0xff) {
        put_coded(buffer, is_text ? 0xd9 : 0xc4, length, 1);
    } else if (length <= 0xffff) {
        put_coded(buffer, is_text ? 0xda : 0xc5, length, 2);
    } else {
        put_coded(buffer, is_text ? 0xdb : 0xc6, length, 4);
    }
    put(buffer, value->bytes, length);
}

static void put_field(kvt_buffer *buffer, kvt_type type, const kvt_value *value) {
    switch (type) {
    case KVT_INT:
        put_integer(buffer, value);
        break;
    case KVT_BOOL:
        put_byte(buffer, value->number ? 0xc3 : 0xc2);
        break;
    case KVT_BYTES:
        put_run(buffer, value, false);
        break;
    case KVT_TEXT:
        put_run(buffer, value, true);
        break;
    }
}

static void put_little_endian(uint8_t *at, uint64_t number, int width) {
    for (int i = 0; i < width; i++) {
        at[i] = (uint8_t)(number >> 8 * i);
    }
}

kvt_status kvt_encode_frame(kvt_buffer *buffer, uint32_t request, const kvt_message *message,
                            uint64_t payload_bytes) {
    const message_rule *rule = rule_of((uint64_t)message->tag);
    size_t room = KVT_HEADER_BYTES + 2;
    for (size_t i = 0; i < rule->num_fields; i++) {
        room += 9 + message->fields[i].num_bytes;
    }
    if (!kvt_buffer_grow(buffer, room)) {
        return KVT_NO_MEMORY;
    }
    size_t start = buffer->num_bytes;
    buffer->num_bytes += KVT_HEADER_BYTES;
    put_byte(buffer, 0x90U | (unsigned)(1 + rule->num_fields));
    put_byte(buffer, (unsigned)message->tag);
    for (size_t i = 0; i < rule->num_fields; i++) {
        put_field(buffer, rule->fields[i].type, &message->fields[i]);
    }
    uint8_t *header = buffer->data + start;
    put_little_endian(header, MAGIC, 4);
    put_little_endian(header + 4, KVT_VERSION, 2);
    put_little_endian(header + 6, 0, 2);
    put_little_endian(header + 8, request, 4);
    put_little_endian(header + 12, buffer->num_bytes - start - KVT_HEADER_BYTES, 4);
    put_little_endian(header + 16, payload_bytes, 8);
    return KVT_OK;
}

/* --- decoding ---------------------------------------------------------------------------------------------------- */

static uint64_t little_endian(const uint8_t *at, int width) {
    uint64_t number = 0;
    for (int i = width - 1; i >= 0; i--) {
        number = number << 8 | at[i];
    }
    return number;
}

kvt_status kvt_decode_header(const uint8_t raw[KVT_HEADER_BYTES], uint64_t max_body_bytes,
                             uint64_t max_payload_bytes, kvt_header *header, kvt_failure *failure) {
    if (little_endian(raw, 4) != MAGIC || little_endian(raw + 6, 2) != 0) {
        return kvt_fail(failure, KVT_PROTOCOL, "the peer does not speak kvtier's protocol (bad magic)");
    }
    unsigned version = (unsigned)little_endian(raw + 4, 2);
    if (version != KVT_VERSION) {
        return kvt_fail(failure, KVT_PROTOCOL, "the peer speaks version %u of the protocol; this is version %d",
                        version, KVT_VERSION);
    }
    header->request = (uint32_t)little_endian(raw + 8, 4);
    header->body_bytes = (uint32_t)little_endian(raw + 12, 4);
    header->payload_bytes = little_endian(raw + 16, 8);
    if (header->body_bytes > max_body_bytes || header->payload_bytes > max_payload_bytes) {
        return kvt_fail(failure, KVT_PROTOCOL, "a frame of %lu bytes of body and %llu of payload is over the limit",
                        (unsigned long)header->body_bytes, (unsigned long long)header->payload_bytes);
    }
    if (header->body_bytes == 0) {
        return kvt_fail(failure, KVT_PROTOCOL, "a frame without a body");
    }
    return KVT_OK;
}

/* What is left of a body. */
typedef struct reader {
    const uint8_t *at;
    size_t left;
} reader;

static bool take_byte(reader *from, unsigned *byte) {
    if (!from->left) {
        return false;
    }
    *byte = *from->at++;
    from->left--;
    return true;
}

static bool take_number(reader *from, size_t width, uint64_t *number) {
    if (from->left < width) {
        return false;
    }
    *number = 0;
    for (size_t i = 0; i < width; i++) {
        *number = *number << 8 | from->at[i];
    }
    from->at += width;
    from->left -= width;
    return true;
}

static bool take_integer(reader *from, kvt_value *value) {
    unsigned code;
    if (!take_byte(from, &code)) {
        return false;
    }
    if (code < 0x80) {
        *value = kvt_number(code);
        return true;
    }
    if (code >= 0xe0) {
        *value = kvt_number((uint64_t)code | ~(uint64_t)0xff);
        value->is_negative = true;
        return true;
    }
    if (code < 0xcc || code > 0xd3) {
        return false;
    }
    bool is_signed = code >= 0xd0;
    size_t width = (size_t)1 << (code & 3);
    *value = kvt_number(0);
    if (!take_number(from, width, &value->number)) {
        return false;
    }
    if (is_signed && value->number >> (8 * width - 1)) {
        value->is_negative = true;
        if (width < 8) {
            value->number |= ~(uint64_t)0 << 8 * width;
        }
    }
    return true;
}

static bool take_truth(reader *from, kvt_value *value) {
    unsigned code;
    if (!take_byte(from, &code) || (code != 0xc2 && code != 0xc3)) {
        return false;
    }
    *value = kvt_truth(code == 0xc3);
    return true;
}

static bool take_run(reader *from, bool is_text, kvt_value *value) {
    unsigned code;
    uint64_t length;
    unsigned first_code = is_text ? 0xd9 : 0xc4;
    if (!take_byte(from, &code)) {
        return false;
    }
    if (is_text && (code & 0xe0) == 0xa0) {
        length = code & 0x1f;
    } else if (code < first_code || code > first_code + 2) {
        return false;
    } else if (!take_number(from, (size_t)1 << (code - first_code), &length)) {
        return false;
    }
    if (length > from->left) {
        return false;
    }
    *value = kvt_bytes(from->at, (size_t)length);
    from->at += length;
    from->left -= (size_t)length;
    return true;
}

size_t kvt_character_bytes(const uint8_t *at, size_t left) {
    uint8_t lead = at[0];
    if (lead < 0x80) {
        return 1;
    }
    size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || left < length) {
        return 0;
    }
    uint8_t least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80; /* neither overlong ... */
    uint8_t most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;  /* nor a surrogate, nor too large */
    if (at[1] < least || at[1] > most) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return length;
}

/* False for what is not UTF-8. */
static bool count_characters(const kvt_value *text, uint64_t *count) {
    size_t at = 0;
    *count = 0;
    while (at < text->num_bytes) {
        size_t length = kvt_character_bytes(text->bytes + at, text->num_bytes - at);
        if (!length) {
            return false;
        }
        at += length;
        ++*count;
    }
    return true;
}

static bool fits_number(const field_rule *rule, const kvt_value *value) {
    if (value->is_negative) {
        return rule->may_be_negative;
    }
    return value->number >= rule->least && value->number <= rule->most;
}

static bool fits_length(const field_rule *rule, const kvt_value *value) {
    return value->num_bytes >= rule->least && value->num_bytes <= rule->most && value->num_bytes % rule->unit == 0;
}

static bool take_field(reader *from, const field_rule *rule, kvt_value *value) {
    uint64_t num_characters;
    switch (rule->type) {
    case KVT_INT:
        return take_integer(from, value) && fits_number(rule, value);
    case KVT_BOOL:
        return take_truth(from, value);
    case KVT_BYTES:
        return take_run(from, false, value) && fits_length(rule, value);
    case KVT_TEXT:
        return take_run(from, true, value) && count_characters(value, &num_characters) &&
               num_characters >= rule->least && num_characters <= rule->most;
    }
    return false;
}

static bool take_array(reader *from, uint64_t *length) {
    unsigned code;
    if (!take_byte(from, &code)) {
        return false;
    }
    if ((code & 0xf0) == 0x90) {
        *length = code & 0x0f;
        return true;
    }
    return (code == 0xdc || code == 0xdd) && take_number(from, code == 0xdc ? 2 : 4, length);
}

/* What must hold between the fields of a message. */
static bool fields_agree(const kvt_message *message) {
    const kvt_value *fields = message->fields;
    switch (message->tag) {
    case KVT_MATCHED:
        return is_ending(&fields[KVT_MATCHED_ENDED]) &&
               fields[KVT_MATCHED_NUM_READY].number <= fields[KVT_MATCHED_OFFSETS].num_bytes / 8;
    case KVT_RESERVED:
        return fields[KVT_RESERVED_POSITIONS].num_bytes == fields[KVT_RESERVED_OFFSETS].num_bytes;
    case KVT_BLOCKS:
        return fields[KVT_BLOCKS_CHECKSUMS].num_bytes % 8 == 0 &&
               fields[KVT_BLOCKS_CHECKSUMS].num_bytes / 8 == fields[KVT_BLOCKS_COUNT].number;
    case KVT_LISTED:
        return fields[0].num_bytes % KVT_HASH_BYTES == 0 &&
               fields[0].num_bytes / KVT_HASH_BYTES == fields[1].num_bytes;
    default:
        return true;
    }
}

kvt_status kvt_decode(const uint8_t *body, size_t num_bytes, kvt_message *message, kvt_failure *failure) {
    reader from = {body, num_bytes};
    uint64_t length;
    kvt_value tag;
    if (!take_array(&from, &length) || length == 0 || !take_integer(&from, &tag) || tag.is_negative) {
        return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: it does not begin with a tag");
    }
    const message_rule *rule = rule_of(tag.number);
    if (!rule) {
        return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: there is no tag %llu",
                        (unsigned long long)tag.number);
    }
    if (length != 1 + rule->num_fields) {
        return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: %s has %zu fields, not %llu",
                        rule->name, rule->num_fields, (unsigned long long)length - 1);
    }
    message->tag = rule->tag;
    for (size_t i = 0; i < rule->num_fields; i++) {
        if (!take_field(&from, &rule->fields[i], &message->fields[i])) {
            return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: field %zu of %s is wrong", i + 1,
                            rule->name);
        }
    }
    if (from.left) {
        return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: %s is followed by %zu bytes",
                        rule->name, from.left);
    }
    if (!fields_agree(message)) {
        return kvt_fail(failure, KVT_PROTOCOL, "a message that cannot be read: the fields of %s do not agree",
                        rule->name);
    }
    return KVT_OK;
}
