/* The saved form of a sequence: header, token ids, llama.cpp's bytes. What each byte means is drawn
 * in orchestrator/runtime/seqstate_format.py, the specification. Knows neither Python nor llama.cpp.
 */
#ifndef SEQSTATE_BLOB_H
#define SEQSTATE_BLOB_H

#include "checksum.h"
#include "outcome.h"

enum {
    HEADER_LENGTH = 256,
    FORMAT_VERSION = 1,
    BUILD_ROOM = 128,
    MODEL_ROOM = 32,
    TENSOR_ENTRY = 12,    /* ggml type, bytes */
    SEQUENCE_PREFIX = 16, /* magic, sequence id, streams, cells */
    STATE_PREFIX = 20,    /* cells, position, sequence ids, transposed, layers */
};

enum memory_kind { MEMORY_ATTENTION = 1, MEMORY_HYBRID = 2, MEMORY_RECURRENT = 3 };

/* What is saved: the recurrent state alone, everything, or a slice of the rows alone. */
enum blob_form { FORM_STATE = 0, FORM_WHOLE = 1, FORM_ROWS = 2 };

struct identity {
    char build[BUILD_ROOM + 1];
    uint8_t model[MODEL_ROOM];
    uint32_t number[6]; /* in the order of identity_fields */
};

/* "n_layer", "n_ctx", "flash_attn", "unified", "type_k", "type_v"; the third and fourth are truths. */
extern const char *const identity_fields[6];

/* The blob has the ids of [start, n_tokens); start is 0 but for a slice. */
struct header {
    uint32_t version;
    enum blob_form form;
    enum memory_kind memory;
    struct identity identity;
    uint32_t start;
    uint32_t n_tokens;
    uint64_t token_hash;
    uint64_t payload_length;
    uint32_t checksum;
};

/* The shape of the recurrent section that ends a payload. Unknown: n_tensors == 0. */
struct layout {
    uint32_t n_layer;
    size_t n_tensors;
    uint64_t *row; /* bytes of each tensor; owned, freed by layout_release */
    size_t size;   /* bytes of the section */
};

const char *memory_name(enum memory_kind kind);
const char *form_name(enum blob_form form);

/* Where the payload begins behind a header and so many ids. */
static inline uint64_t blob_start(uint64_t n_ids)
{
    return HEADER_LENGTH + 4 * n_ids;
}

static inline uint32_t header_n_ids(const struct header *header)
{
    return header->n_tokens - header->start;
}

/* Reads `head` (at least min(n_bytes, HEADER_LENGTH) bytes) of a blob of `n_bytes`; false with a
 * refusal when it is no header or the lengths in it do not add up to n_bytes. */
bool blob_frame(struct header *header, const uint8_t *head, uint64_t n_bytes,
                struct outcome *outcome);

/* blob_frame and every check that needs all bytes; false with a refusal. */
bool blob_verify(struct header *header, const struct checksum *sum, const uint8_t *blob,
                 size_t n_bytes, struct outcome *outcome);

/* Refuses a verified header that belongs to another kind of memory or another context. */
bool blob_belongs(const struct header *header, enum memory_kind kind, const struct identity *here,
                  struct outcome *outcome);

/* Refuses a state of another form. */
bool blob_demand_form(const struct header *header, enum blob_form wanted, struct outcome *outcome);

/* Refuses token ids that are not those the state was saved after; a slice looks at those up to its
 * end. */
bool blob_compare_tokens(const uint8_t *blob, const struct header *header,
                         const struct checksum *sum, const uint8_t *fed, size_t n_fed,
                         struct outcome *outcome);

/* Writes header and token ids in front of a payload that is already in place. Reads form, memory,
 * identity, start, n_tokens and payload_length of `header`; `fed` has the n_tokens ids. */
void blob_seal(const struct header *header, const struct checksum *sum, uint8_t *blob,
               const uint8_t *fed);

/* Refuses a payload that is not n_rows rows of one stream without a recurrent state; `empty` is
 * llama.cpp's form of an empty recurrent half, of no length where there is none. */
bool slice_check(const uint8_t *payload, uint64_t n_bytes, uint32_t n_rows, const uint8_t *empty,
                 size_t n_empty, struct outcome *outcome);

/* Learns the layout from llama.cpp's bytes of an empty sequence; leaves it unknown where they have
 * another form. False only for want of memory. */
bool layout_learn(struct layout *layout, const uint8_t *empty, size_t n_bytes);

void layout_release(struct layout *layout);

/* Writes a state at position 0 with every float zero; `room` has 8 + layout->size bytes. */
void layout_zeros(const struct layout *layout, uint8_t *room);

/* Refuses a payload whose recurrent section has another shape or holds NaN or infinity; an unknown
 * layout passes. */
bool layout_check(const struct layout *layout, const uint8_t *payload, uint64_t n_bytes,
                  uint32_t n_tokens, struct outcome *outcome);

#endif
