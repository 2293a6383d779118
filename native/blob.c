#include "blob.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "saved states are little-endian, llama.cpp's bytes in them are the machine's own"
#endif

/* Where each field lies; see the drawing in seqstate_format.py. */
enum {
    AT_VERSION = 8,
    AT_HEADER_LENGTH = 12,
    AT_FORM = 16,
    AT_MEMORY = 20,
    AT_NUMBERS = 24,
    AT_PAYLOAD_LENGTH = 48,
    AT_TOKEN_HASH = 56,
    AT_N_TOKENS = 64,
    AT_CHECKSUM = 68,
    AT_MODEL = 72,
    AT_BUILD = 104,
    AT_START = 232,
    AT_ZERO = 236,
};

static const uint8_t MAGIC[8] = {'o', 'r', 'c', 's', 't', 'a', 't', 'e'};
static const uint32_t SEQUENCE_MAGIC = 0xAF143CD8u; /* what llama.cpp begins a state with */

const char *const identity_fields[6] = {"n_layer", "n_ctx",  "flash_attn",
                                        "unified", "type_k", "type_v"};

bool fail(struct outcome *outcome, enum fault fault, const char *field, const char *format, ...)
{
    va_list values;
    outcome->fault = fault;
    outcome->field = field;
    va_start(values, format);
    vsnprintf(outcome->text, sizeof outcome->text, format, values);
    va_end(values);
    return false;
}

const char *memory_name(enum memory_kind kind)
{
    switch (kind) {
    case MEMORY_ATTENTION:
        return "attention";
    case MEMORY_HYBRID:
        return "hybrid";
    case MEMORY_RECURRENT:
        return "recurrent";
    }
    return "unknown";
}

const char *form_name(enum blob_form form)
{
    switch (form) {
    case FORM_STATE:
        return "state";
    case FORM_WHOLE:
        return "whole";
    case FORM_ROWS:
        return "rows";
    }
    return "unknown";
}

static uint32_t get_u32(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t get_u64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void put_u32(uint8_t *at, uint32_t value)
{
    memcpy(at, &value, sizeof value);
}

static void put_u64(uint8_t *at, uint64_t value)
{
    memcpy(at, &value, sizeof value);
}

/* Two hexadecimal digits per byte and a NUL. */
static void write_hex(char *room, const uint8_t *bytes, size_t n_bytes)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n_bytes; i++) {
        *room++ = digits[bytes[i] >> 4];
        *room++ = digits[bytes[i] & 15];
    }
    *room = '\0';
}

static bool all_zero(const uint8_t *bytes, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    return true;
}

/* --- reading ----------------------------------------------------------------------------------- */

static void read_fields(struct header *header, const uint8_t *head)
{
    memset(header, 0, sizeof *header);
    header->version = get_u32(head + AT_VERSION);
    header->form = (enum blob_form)get_u32(head + AT_FORM);
    header->memory = (enum memory_kind)get_u32(head + AT_MEMORY);
    for (int i = 0; i < 6; i++) {
        header->identity.number[i] = get_u32(head + AT_NUMBERS + 4 * i);
    }
    header->payload_length = get_u64(head + AT_PAYLOAD_LENGTH);
    header->token_hash = get_u64(head + AT_TOKEN_HASH);
    header->n_tokens = get_u32(head + AT_N_TOKENS);
    header->checksum = get_u32(head + AT_CHECKSUM);
    header->start = get_u32(head + AT_START);
    memcpy(header->identity.model, head + AT_MODEL, MODEL_ROOM);
    memcpy(header->identity.build, head + AT_BUILD, BUILD_ROOM);
}

bool blob_frame(struct header *header, const uint8_t *head, uint64_t n_bytes,
                struct outcome *outcome)
{
    char found[17];
    char expected[17];

    if (n_bytes < HEADER_LENGTH) {
        return fail(outcome, FAULT_REFUSED, "length",
                    "the saved state has %" PRIu64 " bytes, its header alone has %d; "
                    "it is truncated, save it again",
                    n_bytes, HEADER_LENGTH);
    }
    if (memcmp(head, MAGIC, sizeof MAGIC) != 0) {
        write_hex(found, head, sizeof MAGIC);
        write_hex(expected, MAGIC, sizeof MAGIC);
        return fail(outcome, FAULT_REFUSED, "magic",
                    "this is no saved state: it begins with %s, not %s", found, expected);
    }
    read_fields(header, head);
    if (header->version != FORMAT_VERSION) {
        return fail(outcome, FAULT_REFUSED, "version",
                    "the saved state has format version %" PRIu32 ", this build reads %d; "
                    "save it again",
                    header->version, FORMAT_VERSION);
    }
    if (get_u32(head + AT_HEADER_LENGTH) != HEADER_LENGTH) {
        return fail(outcome, FAULT_REFUSED, "header",
                    "the header has %" PRIu32 " bytes, expected are %d",
                    get_u32(head + AT_HEADER_LENGTH), HEADER_LENGTH);
    }
    if (header->start > header->n_tokens || n_bytes < blob_start(header_n_ids(header)) ||
        n_bytes - blob_start(header_n_ids(header)) != header->payload_length) {
        return fail(outcome, FAULT_REFUSED, "length",
                    "the saved state of tokens %" PRIu32 " to %" PRIu32 " and %" PRIu64
                    " payload bytes has %" PRIu64
                    " bytes; it is truncated or was extended, save it again",
                    header->start, header->n_tokens, header->payload_length, n_bytes);
    }
    return true;
}

/* Forms that no save writes for such a memory. */
static bool is_odd_form(const struct header *header)
{
    switch (header->form) {
    case FORM_STATE:
        return header->start != 0 || header->memory == MEMORY_RECURRENT ||
               (header->memory == MEMORY_ATTENTION && header->payload_length != 0);
    case FORM_WHOLE:
        return header->start != 0;
    case FORM_ROWS:
        return header->start == header->n_tokens || header->memory == MEMORY_RECURRENT;
    }
    return true;
}

/* Values that no save writes, told only after the checksum: damage should be called damage. */
static bool is_odd(const struct header *header, const uint8_t *head)
{
    const uint32_t *number = header->identity.number;
    size_t build_length = strlen(header->identity.build);

    return is_odd_form(header) || number[2] > 1 || number[3] > 1 ||
           !all_zero(head + AT_ZERO, HEADER_LENGTH - AT_ZERO) ||
           !all_zero(head + AT_BUILD + build_length, BUILD_ROOM - build_length) ||
           header->memory < MEMORY_ATTENTION || header->memory > MEMORY_RECURRENT ||
           header->n_tokens == 0 || header->n_tokens > INT32_MAX;
}

static uint32_t blob_checksum(const struct checksum *sum, const uint8_t *blob, size_t n_bytes)
{
    static const uint8_t zero[4];
    uint32_t crc = checksum_update(sum, 0, blob, AT_CHECKSUM);
    crc = checksum_update(sum, crc, zero, sizeof zero);
    return checksum_update(sum, crc, blob + AT_CHECKSUM + 4, n_bytes - AT_CHECKSUM - 4);
}

bool blob_verify(struct header *header, const struct checksum *sum, const uint8_t *blob,
                 size_t n_bytes, struct outcome *outcome)
{
    if (!blob_frame(header, blob, n_bytes, outcome)) {
        return false;
    }
    uint32_t computed = blob_checksum(sum, blob, n_bytes);
    if (computed != header->checksum) {
        return fail(outcome, FAULT_REFUSED, "checksum",
                    "the saved state is damaged: its checksum is %08" PRIx32 ", %08" PRIx32
                    " was saved; save it again",
                    computed, header->checksum);
    }
    if (is_odd(header, blob)) {
        return fail(outcome, FAULT_REFUSED, "header",
                    "the header holds values that no version of this format writes");
    }
    if (header->start == 0 &&
        checksum_both_ways(sum, blob + HEADER_LENGTH, 4 * (size_t)header->n_tokens) !=
            header->token_hash) {
        return fail(outcome, FAULT_REFUSED, "token_hash",
                    "the token hash does not belong to the token ids; save it again");
    }
    return true;
}

/* --- belonging --------------------------------------------------------------------------------- */

static bool differs(struct outcome *outcome, const char *field, const char *saved, const char *here)
{
    return fail(outcome, FAULT_REFUSED, field,
                "the state was saved with %s %s, this context has %s; read the prompt again instead",
                field, saved, here);
}

static void write_number(char *room, size_t n_room, int field, uint32_t number)
{
    if (field == 2 || field == 3) {
        snprintf(room, n_room, "%s", number ? "True" : "False");
    } else if (field < 2) {
        snprintf(room, n_room, "%" PRIu32, number);
    } else {
        snprintf(room, n_room, "%" PRId32, (int32_t)number);
    }
}

bool blob_belongs(const struct header *header, enum memory_kind kind, const struct identity *here,
                  struct outcome *outcome)
{
    const struct identity *saved = &header->identity;
    char was[24];
    char is[24];

    if (header->memory != kind) {
        return differs(outcome, "memory", memory_name(header->memory), memory_name(kind));
    }
    if (strcmp(saved->build, here->build) != 0) {
        return differs(outcome, "build", saved->build, here->build);
    }
    if (memcmp(saved->model, here->model, MODEL_ROOM) != 0) {
        write_hex(was, saved->model, 8);
        write_hex(is, here->model, 8);
        return differs(outcome, "model", was, is);
    }
    for (int i = 0; i < 6; i++) {
        if (saved->number[i] != here->number[i]) {
            write_number(was, sizeof was, i, saved->number[i]);
            write_number(is, sizeof is, i, here->number[i]);
            return differs(outcome, identity_fields[i], was, is);
        }
    }
    return true;
}

bool blob_demand_form(const struct header *header, enum blob_form wanted, struct outcome *outcome)
{
    if (header->form == wanted) {
        return true;
    }
    return fail(outcome, FAULT_REFUSED, "form",
                "the state was saved as \"%s\", needed is \"%s\"", form_name(header->form),
                form_name(wanted));
}

bool blob_compare_tokens(const uint8_t *blob, const struct header *header,
                         const struct checksum *sum, const uint8_t *fed, size_t n_fed,
                         struct outcome *outcome)
{
    const uint8_t *saved = blob + HEADER_LENGTH;
    const uint8_t *given = fed + 4 * (size_t)header->start;
    size_t n_ids = header_n_ids(header);

    if (n_fed != header->n_tokens && !(header->form == FORM_ROWS && n_fed > header->n_tokens)) {
        return fail(outcome, FAULT_REFUSED, "tokens",
                    "the state was saved after %" PRIu32 " tokens, %zu were given; "
                    "give the tokens it was saved with",
                    header->n_tokens, n_fed);
    }
    if (memcmp(saved, given, 4 * n_ids) != 0) {
        size_t at = 0;
        while (get_u32(saved + 4 * at) == get_u32(given + 4 * at)) {
            at++;
        }
        return fail(outcome, FAULT_REFUSED, "tokens",
                    "token %zu of the saved state is %" PRId32 ", %" PRId32 " was given; "
                    "give the tokens it was saved with",
                    header->start + at, (int32_t)get_u32(saved + 4 * at),
                    (int32_t)get_u32(given + 4 * at));
    }
    if (header->start != 0 &&
        checksum_both_ways(sum, fed, 4 * (size_t)header->n_tokens) != header->token_hash) {
        return fail(outcome, FAULT_REFUSED, "tokens",
                    "the %" PRIu32 " tokens before the saved rows are not those that were given; "
                    "give the tokens they were saved with",
                    header->start);
    }
    return true;
}

/* --- writing ----------------------------------------------------------------------------------- */

void blob_seal(const struct header *header, const struct checksum *sum, uint8_t *blob,
               const uint8_t *fed)
{
    size_t n_ids = header_n_ids(header);

    memset(blob, 0, HEADER_LENGTH);
    memcpy(blob, MAGIC, sizeof MAGIC);
    put_u32(blob + AT_VERSION, FORMAT_VERSION);
    put_u32(blob + AT_HEADER_LENGTH, HEADER_LENGTH);
    put_u32(blob + AT_FORM, (uint32_t)header->form);
    put_u32(blob + AT_MEMORY, (uint32_t)header->memory);
    for (int i = 0; i < 6; i++) {
        put_u32(blob + AT_NUMBERS + 4 * i, header->identity.number[i]);
    }
    put_u64(blob + AT_PAYLOAD_LENGTH, header->payload_length);
    put_u64(blob + AT_TOKEN_HASH, checksum_both_ways(sum, fed, 4 * (size_t)header->n_tokens));
    put_u32(blob + AT_N_TOKENS, header->n_tokens);
    memcpy(blob + AT_MODEL, header->identity.model, MODEL_ROOM);
    memcpy(blob + AT_BUILD, header->identity.build, strlen(header->identity.build));
    put_u32(blob + AT_START, header->start);
    memcpy(blob + HEADER_LENGTH, fed + 4 * (size_t)header->start, 4 * n_ids);
    size_t n_bytes = (size_t)(blob_start(n_ids) + header->payload_length);
    put_u32(blob + AT_CHECKSUM, blob_checksum(sum, blob, n_bytes));
}

/* --- a slice ----------------------------------------------------------------------------------- */

bool slice_check(const uint8_t *payload, uint64_t n_bytes, uint32_t n_rows, const uint8_t *empty,
                 size_t n_empty, struct outcome *outcome)
{
    /* magic, sequence id, streams, cells: of a sliding window the first section holds every row */
    if (n_bytes < SEQUENCE_PREFIX + n_empty || get_u32(payload + 8) != 1 ||
        get_u32(payload + 12) != n_rows) {
        return fail(outcome, FAULT_REFUSED, "payload",
                    "the saved rows are not %" PRIu32 " rows of one stream", n_rows);
    }
    if (n_empty > 8 && memcmp(payload + n_bytes - (n_empty - 8), empty + 8, n_empty - 8) != 0) {
        return fail(outcome, FAULT_REFUSED, "payload",
                    "the saved rows come with a recurrent state, or with none at all");
    }
    return true;
}

/* --- the recurrent section --------------------------------------------------------------------- */

bool layout_learn(struct layout *layout, const uint8_t *empty, size_t n_bytes)
{
    memset(layout, 0, sizeof *layout);
    /* magic, sequence id, then a section without cells: cells, transposed, layers, tensors */
    if (n_bytes <= 20 || (n_bytes - 20) % TENSOR_ENTRY != 0 || get_u32(empty + 8) != 0 ||
        get_u32(empty + 12) != 0) {
        return true;
    }
    size_t n_tensors = (n_bytes - 20) / TENSOR_ENTRY;
    uint64_t *row = malloc(n_tensors * sizeof *row);
    if (row == NULL) {
        return false;
    }
    size_t size = STATE_PREFIX;
    for (size_t i = 0; i < n_tensors; i++) {
        const uint8_t *entry = empty + 20 + TENSOR_ENTRY * i;
        row[i] = get_u64(entry + 4);
        if (get_u32(entry) != 0 || row[i] % 4 != 0 || row[i] > (UINT64_C(1) << 40)) {
            free(row);
            return true;
        }
        size += TENSOR_ENTRY + (size_t)row[i];
    }
    layout->n_layer = get_u32(empty + 16);
    layout->n_tensors = n_tensors;
    layout->row = row;
    layout->size = size;
    return true;
}

void layout_release(struct layout *layout)
{
    free(layout->row);
    memset(layout, 0, sizeof *layout);
}

void layout_zeros(const struct layout *layout, uint8_t *room)
{
    memset(room, 0, 8 + layout->size);
    put_u32(room, SEQUENCE_MAGIC);
    put_u32(room + 8, 1);
    put_u32(room + 8 + 16, layout->n_layer);
    uint8_t *entry = room + 8 + STATE_PREFIX;
    for (size_t i = 0; i < layout->n_tensors; i++) {
        put_u64(entry + 4, layout->row[i]);
        entry += TENSOR_ENTRY + layout->row[i];
    }
}

/* A float is finite unless all eight exponent bits are set; adding one to the exponent then carries
 * into the sign's place. Two floats at a time, no branch per float. */
static bool all_finite(const uint8_t *floats, uint64_t n_bytes)
{
    const uint64_t exponents = UINT64_C(0x7F8000007F800000);
    const uint64_t one = UINT64_C(0x0080000000800000);
    uint64_t carried = 0;
    uint64_t i = 0;

    for (; i + 8 <= n_bytes; i += 8) {
        carried |= (get_u64(floats + i) & exponents) + one;
    }
    for (; i + 4 <= n_bytes; i += 4) {
        carried |= (get_u32(floats + i) & exponents) + one;
    }
    return (carried & UINT64_C(0x8000000080000000)) == 0;
}

bool layout_check(const struct layout *layout, const uint8_t *payload, uint64_t n_bytes,
                  uint32_t n_tokens, struct outcome *outcome)
{
    if (layout->n_tensors == 0) {
        return true;
    }
    const uint8_t *at = NULL;
    if (n_bytes >= 8 + (uint64_t)layout->size) {
        at = payload + (n_bytes - layout->size);
    }
    if (at == NULL || get_u32(at) != 1 || get_u32(at + 4) != n_tokens - 1 ||
        !all_zero(at + 8, 8) || get_u32(at + 16) != layout->n_layer) {
        return fail(outcome, FAULT_REFUSED, "payload",
                    "the recurrent section is not one state at the saved length");
    }
    at += STATE_PREFIX;
    for (size_t i = 0; i < layout->n_tensors; i++) {
        if (get_u32(at) != 0 || get_u64(at + 4) != layout->row[i]) {
            return fail(outcome, FAULT_REFUSED, "payload",
                        "the recurrent section has tensors of another size");
        }
        if (!all_finite(at + TENSOR_ENTRY, layout->row[i])) {
            return fail(outcome, FAULT_REFUSED, "finite",
                        "the recurrent state holds NaN or infinity; scrub its sequence and read the "
                        "prompt again");
        }
        at += TENSOR_ENTRY + layout->row[i];
    }
    return true;
}
