#include "sequences.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { WHOLE = 0, STATE_ONLY = 1 }; /* llama_state_seq_flags */

/* --- small steps ------------------------------------------------------------------------------- */

struct positions sequences_positions(const struct sequences *all, int32_t sequence)
{
    struct positions held = {
        .low = all->llama.pos_min(all->memory, sequence),
        .high = all->llama.pos_max(all->memory, sequence),
    };
    return held;
}

static bool is_empty(struct positions held)
{
    return held.low == -1 && held.high == -1;
}

static uint32_t state_flags(const struct sequences *all)
{
    return all->kind == MEMORY_HYBRID ? STATE_ONLY : WHOLE;
}

static bool demand_empty(const struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    struct positions held = sequences_positions(all, sequence);
    if (is_empty(held)) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "sequence %" PRId32 " still holds (%" PRId32 ", %" PRId32 ") after a clear",
                sequence, held.low, held.high);
}

bool sequences_clear(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    all->llama.seq_rm(all->memory, sequence, -1, -1);
    return demand_empty(all, sequence, outcome);
}

/* Empties a sequence after a failure that `outcome` already tells; a failure to do so replaces it. */
static bool clear_after(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    sequences_clear(all, sequence, outcome);
    return false;
}

static bool trim(struct sequences *all, int32_t sequence, int32_t length, struct outcome *outcome)
{
    if (all->llama.seq_rm(all->memory, sequence, length, -1)) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "llama.cpp would not cut sequence %" PRId32 " at %" PRId32, sequence, length);
}

static bool get(struct sequences *all, int32_t sequence, uint32_t flags, uint8_t *room,
                size_t n_room, struct outcome *outcome)
{
    size_t written = 0;
    if (n_room != 0) {
        written = all->llama.get_data(all->context, room, n_room, sequence, flags);
    }
    if (n_room != 0 && written == n_room) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "llama.cpp wrote %zu of %zu state bytes of sequence %" PRId32, written, n_room,
                sequence);
}

/* False when llama.cpp did not take all bytes; half of them may be in then. */
static bool set(struct sequences *all, int32_t sequence, uint32_t flags, const uint8_t *bytes,
                size_t n_bytes)
{
    return n_bytes != 0 &&
           all->llama.set_data(all->context, bytes, n_bytes, sequence, flags) == n_bytes;
}

/* The recurrent half of a sequence in llama.cpp's form, to be freed by the caller; NULL after a
 * failure. */
static uint8_t *exported(struct sequences *all, int32_t sequence, size_t *size,
                         struct outcome *outcome)
{
    *size = all->llama.get_size(all->context, sequence, state_flags(all));
    uint8_t *state = malloc(*size != 0 ? *size : 1);
    if (state == NULL) {
        fail(outcome, FAULT_NO_MEMORY, NULL, "no memory for a state of %zu bytes", *size);
        return NULL;
    }
    if (!get(all, sequence, state_flags(all), state, *size, outcome)) {
        free(state);
        return NULL;
    }
    return state;
}

/* How many tokens a sequence holds; 0 for rows whose number is not visible, -1 after a failure. */
static int64_t extent(const struct sequences *all, int32_t sequence, struct positions held,
                      struct outcome *outcome)
{
    if (all->kind != MEMORY_ATTENTION && held.low != held.high && held.high >= 0) {
        fail(outcome, FAULT_BACKEND, NULL,
             "sequence %" PRId32 " has its state at %" PRId32 " and rows to %" PRId32
             "; clear it",
             sequence, held.low, held.high);
        return -1;
    }
    return (int64_t)held.high + 1;
}

/* --- opening ----------------------------------------------------------------------------------- */

bool sequences_open(struct sequences *all, struct outcome *outcome)
{
    all->memory = all->llama.get_memory(all->context);
    if (all->memory == NULL) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "the context has no memory; its model keeps no sequences");
    }
    if (all->kind == MEMORY_ATTENTION) {
        return true;
    }
    for (int32_t sequence = 0; sequence < all->n_sequences; sequence++) {
        if (is_empty(sequences_positions(all, sequence))) {
            all->empty = exported(all, sequence, &all->empty_size, outcome);
            if (all->empty == NULL) {
                return false;
            }
            if (!layout_learn(&all->layout, all->empty, all->empty_size)) {
                return fail(outcome, FAULT_NO_MEMORY, NULL, "no memory for a layout");
            }
            return true;
        }
    }
    return fail(outcome, FAULT_ARGUMENT, NULL,
                "no sequence is empty; make this before anything is decoded");
}

void sequences_release(struct sequences *all)
{
    free(all->empty);
    all->empty = NULL;
    layout_release(&all->layout);
}

/* --- copying ----------------------------------------------------------------------------------- */

/* Where the copied rows end, -1 for all of them, -2 after a failure. */
static int32_t copy_end(const struct sequences *all, int32_t source, int32_t low, int64_t held,
                        int64_t length, struct outcome *outcome)
{
    if (length < 0 || length == held) {
        return -1;
    }
    if (held != 0 && length > held) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "length is %" PRId64 ", sequence %" PRId32 " holds %" PRId64, length, source, held);
        return -2;
    }
    if (all->kind == MEMORY_RECURRENT) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "length is %" PRId64 ", sequence %" PRId32 " holds %" PRId64
             "; a recurrent state cannot be cut",
             length, source, held);
        return -2;
    }
    if (!all->identity.number[3]) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "rows can be copied in part only when the cells are unified");
        return -2;
    }
    if (all->kind == MEMORY_ATTENTION && low > 0) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "sequence %" PRId32 " holds rows from %" PRId32
             " on (a sliding window); copy it whole",
             source, low);
        return -2;
    }
    return (int32_t)length;
}

/* Drops the recurrent half; the sequence is cleared when that fails. */
static bool strip(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    if (!set(all, sequence, STATE_ONLY, all->empty, all->empty_size)) {
        fail(outcome, FAULT_BACKEND, NULL,
             "llama.cpp would not strip sequence %" PRId32 "; it was cleared", sequence);
        return clear_after(all, sequence, outcome);
    }
    struct positions held = sequences_positions(all, sequence);
    if (held.low < 0 || held.high != -1) {
        fail(outcome, FAULT_BACKEND, NULL,
             "sequence %" PRId32 " held (%" PRId32 ", %" PRId32 ") stripped; it was cleared",
             sequence, held.low, held.high);
        return clear_after(all, sequence, outcome);
    }
    return true;
}

static bool check_copy(const struct sequences *all, int32_t target, struct positions source,
                       int32_t end, struct outcome *outcome)
{
    struct positions held = sequences_positions(all, target);
    bool sound;

    if (all->kind == MEMORY_HYBRID && (end >= 0 || source.high < 0)) {
        sound = held.low >= 0 && held.high == -1;
    } else if (end >= 0) {
        sound = held.low == source.low && held.high == end - 1;
    } else {
        sound = held.low == source.low && held.high == source.high;
    }
    if (sound) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "the copy in sequence %" PRId32 " holds (%" PRId32 ", %" PRId32 ")", target,
                held.low, held.high);
}

bool sequences_copy(struct sequences *all, int32_t source, int32_t target, int64_t length,
                    struct outcome *outcome)
{
    if (source == target) {
        return fail(outcome, FAULT_ARGUMENT, NULL, "source and target are both %" PRId32, source);
    }
    struct positions held = sequences_positions(all, source);
    if (is_empty(held)) {
        return fail(outcome, FAULT_ARGUMENT, NULL, "sequence %" PRId32 " is empty", source);
    }
    if (!is_empty(sequences_positions(all, target))) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is not empty; clear it first", target);
    }
    int64_t n_held = extent(all, source, held, outcome);
    if (n_held < 0) {
        return false;
    }
    int32_t end = copy_end(all, source, held.low, n_held, length, outcome);
    if (end < -1) {
        return false;
    }
    all->llama.seq_cp(all->memory, source, target, -1, end);
    bool sound = true;
    if (all->kind == MEMORY_HYBRID && held.high >= 0) {
        sound = end < 0 ? trim(all, target, (int32_t)n_held, outcome)
                        : strip(all, target, outcome);
    }
    if (!sound || !check_copy(all, target, held, end, outcome)) {
        return clear_after(all, target, outcome);
    }
    return true;
}

/* --- clearing and cutting ---------------------------------------------------------------------- */

bool sequences_clear_all(struct sequences *all, struct outcome *outcome)
{
    all->llama.memory_clear(all->memory, true);
    for (int32_t sequence = 0; sequence < all->n_sequences; sequence++) {
        if (!demand_empty(all, sequence, outcome)) {
            return false;
        }
    }
    return true;
}

bool sequences_cut(struct sequences *all, int32_t sequence, int32_t length,
                   struct outcome *outcome)
{
    struct positions held = sequences_positions(all, sequence);

    if (all->kind == MEMORY_ATTENTION) {
        if (length > held.high) {
            return true;
        }
        if (held.low > 0 && length != 0) {
            return fail(outcome, FAULT_ARGUMENT, NULL,
                        "sequence %" PRId32 " holds rows from %" PRId32
                        " on (a sliding window); it cannot be cut",
                        sequence, held.low);
        }
    } else if (held.high >= 0 && length <= held.low) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "length is %" PRId32 ", the state of sequence %" PRId32 " is at %" PRId32
                    "; a recurrent state cannot be cut",
                    length, sequence, held.low);
    }
    if (length == 0) {
        return sequences_clear(all, sequence, outcome);
    }
    return trim(all, sequence, length, outcome);
}

bool sequences_strip(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    if (is_empty(sequences_positions(all, sequence))) {
        return fail(outcome, FAULT_ARGUMENT, NULL, "sequence %" PRId32 " is empty", sequence);
    }
    return strip(all, sequence, outcome);
}

/* --- scrubbing --------------------------------------------------------------------------------- */

static bool overwrite_cell(struct sequences *all, int32_t sequence, const uint8_t *state,
                           size_t n_bytes, struct outcome *outcome)
{
    if (set(all, sequence, state_flags(all), state, n_bytes)) {
        return true;
    }
    fail(outcome, FAULT_BACKEND, NULL,
         "llama.cpp would not take a state for sequence %" PRId32, sequence);
    return clear_after(all, sequence, outcome);
}

/* Gives a sequence that has a state a cell of its own with the same content. */
static bool renew_cell(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    size_t size = 0;
    uint8_t *state = exported(all, sequence, &size, outcome);
    if (state == NULL) {
        return false;
    }
    bool done = overwrite_cell(all, sequence, state, size, outcome);
    free(state);
    return done;
}

/* Why every sequence takes part is told in the specification, at SequenceMemory.scrub. */
static bool overwrite_cells(struct sequences *all, int32_t scrubbed, struct positions *before,
                            const uint8_t *zeros, struct outcome *outcome)
{
    for (int32_t q = 0; q < all->n_sequences; q++) {
        before[q] = sequences_positions(all, q);
    }
    for (int32_t q = 0; q < all->n_sequences; q++) {
        if (q != scrubbed && before[q].high >= 0 && !renew_cell(all, q, outcome)) {
            return false;
        }
    }
    for (int32_t q = 0; q < all->n_sequences; q++) {
        if ((q == scrubbed || before[q].high < 0) &&
            !overwrite_cell(all, q, zeros, 8 + all->layout.size, outcome)) {
            return false;
        }
    }
    for (int32_t q = 0; q < all->n_sequences; q++) {
        if (before[q].high >= 0) {
            continue;
        }
        if (!(is_empty(before[q]) ? sequences_clear(all, q, outcome) : strip(all, q, outcome))) {
            return false;
        }
    }
    return true;
}

bool sequences_scrub(struct sequences *all, int32_t sequence, struct outcome *outcome)
{
    bool done = false;
    uint8_t *zeros = NULL;
    struct positions *before = NULL;

    if (all->kind == MEMORY_ATTENTION) {
        return sequences_clear(all, sequence, outcome);
    }
    if (all->layout.n_tensors == 0) {
        return fail(outcome, FAULT_BACKEND, NULL,
                    "the layout of this state is not known; use clear_all instead");
    }
    zeros = malloc(8 + all->layout.size);
    before = malloc((size_t)all->n_sequences * sizeof *before);
    if (zeros == NULL || before == NULL) {
        fail(outcome, FAULT_NO_MEMORY, NULL, "no memory to scrub a sequence");
        goto end;
    }
    layout_zeros(&all->layout, zeros);
    done = overwrite_cells(all, sequence, before, zeros, outcome) &&
           sequences_clear(all, sequence, outcome);
end:
    free(before);
    free(zeros);
    return done;
}

/* --- saving ------------------------------------------------------------------------------------ */

/* The number of tokens of a sequence that can be saved like this; -1 after a failure. */
static int64_t savable(const struct sequences *all, int32_t sequence, bool rows,
                       struct outcome *outcome)
{
    if (!rows && all->kind != MEMORY_HYBRID) {
        fail(outcome, FAULT_ARGUMENT, NULL, "rows=False is for hybrid memory, this is %s",
             memory_name(all->kind));
        return -1;
    }
    struct positions held = sequences_positions(all, sequence);
    if (is_empty(held)) {
        fail(outcome, FAULT_ARGUMENT, NULL, "sequence %" PRId32 " is empty", sequence);
        return -1;
    }
    if (held.high < 0) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "sequence %" PRId32 " holds rows without a recurrent state", sequence);
        return -1;
    }
    return extent(all, sequence, held, outcome);
}

/* 0 after a failure. */
static size_t payload_size(struct sequences *all, int32_t sequence, bool rows,
                           struct outcome *outcome)
{
    size_t size = all->llama.get_size(all->context, sequence, rows ? WHOLE : STATE_ONLY);
    if (size == 0) {
        fail(outcome, FAULT_BACKEND, NULL,
             "llama.cpp gives no state size for sequence %" PRId32, sequence);
    }
    return size;
}

size_t sequences_state_size(struct sequences *all, int32_t sequence, bool rows,
                            struct outcome *outcome)
{
    int64_t held = savable(all, sequence, rows, outcome);
    if (held < 0) {
        return 0;
    }
    size_t payload = payload_size(all, sequence, rows, outcome);
    return payload == 0 ? 0 : (size_t)blob_start((uint64_t)held) + payload;
}

bool sequences_save_size(struct sequences *all, struct save *save, struct outcome *outcome)
{
    int64_t held = savable(all, save->sequence, save->rows, outcome);
    if (held < 0) {
        return false;
    }
    if ((uint64_t)held != save->n_fed) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "%zu tokens were given, sequence %" PRId32 " holds %" PRId64, save->n_fed,
                    save->sequence, held);
    }
    size_t payload = payload_size(all, save->sequence, save->rows, outcome);
    if (payload == 0) {
        return false;
    }
    save->size = (size_t)blob_start(save->n_fed) + payload;
    return true;
}

bool sequences_save(struct sequences *all, const struct save *save, uint8_t *room,
                    struct outcome *outcome)
{
    size_t start = (size_t)blob_start(save->n_fed);
    struct header header = {
        .rows = save->rows,
        .memory = all->kind,
        .identity = all->identity,
        .payload_length = save->size - start,
    };

    if (!get(all, save->sequence, save->rows ? WHOLE : STATE_ONLY, room + start,
             save->size - start, outcome)) {
        return false;
    }
    if (!layout_check(&all->layout, room + start, save->size - start, (uint32_t)save->n_fed,
                      outcome)) {
        return false;
    }
    blob_seal(&header, all->sum, room, save->fed, save->n_fed);
    return true;
}

/* --- restoring --------------------------------------------------------------------------------- */

/* Everything that can be told before llama.cpp sees a byte. */
static bool check_fit(const struct sequences *all, struct header *header, const uint8_t *blob,
                      size_t n_bytes, const uint8_t *fed, size_t n_fed, struct outcome *outcome)
{
    if (!blob_verify(header, all->sum, blob, n_bytes, outcome)) {
        return false;
    }
    return blob_belongs(header, all->kind, &all->identity, outcome) &&
           blob_compare_tokens(blob, header, fed, n_fed, outcome) &&
           layout_check(&all->layout, blob + blob_start(header->n_tokens),
                        header->payload_length, header->n_tokens, outcome);
}

static bool check_restored(struct sequences *all, int32_t sequence, const struct header *header,
                           struct outcome *outcome)
{
    int32_t last = (int32_t)header->n_tokens - 1;

    if (!header->rows && sequences_positions(all, sequence).high < last) {
        return fail(outcome, FAULT_REFUSED, "rows",
                    "sequence %" PRId32 " holds fewer rows than the %" PRIu32 " the state needs; "
                    "read the prompt again instead",
                    sequence, header->n_tokens);
    }
    if (all->kind == MEMORY_HYBRID && !trim(all, sequence, last + 1, outcome)) {
        return false;
    }
    struct positions held = sequences_positions(all, sequence);
    if (held.high != last || (all->kind != MEMORY_ATTENTION && held.low != held.high)) {
        return fail(outcome, FAULT_REFUSED, "positions",
                    "the restored sequence holds (%" PRId32 ", %" PRId32 "), %" PRIu32
                    " tokens were saved; read the prompt again instead",
                    held.low, held.high, header->n_tokens);
    }
    return true;
}

static bool import(struct sequences *all, int32_t sequence, const struct header *header,
                   const uint8_t *payload, struct outcome *outcome)
{
    if (set(all, sequence, header->rows ? WHOLE : STATE_ONLY, payload,
            (size_t)header->payload_length)) {
        return check_restored(all, sequence, header, outcome);
    }
    if (header->rows && all->kind != MEMORY_RECURRENT) {
        return fail(outcome, FAULT_FULL, NULL,
                    "the pool has no %" PRIu32 " free cells for the saved state; "
                    "clear a sequence and try again",
                    header->n_tokens);
    }
    return fail(outcome, FAULT_REFUSED, "payload",
                "llama.cpp refused the saved state; read the prompt again instead");
}

bool sequences_restore(struct sequences *all, int32_t sequence, const uint8_t *blob, size_t n_bytes,
                       const uint8_t *fed, size_t n_fed, struct outcome *outcome)
{
    struct header header;

    if (!check_fit(all, &header, blob, n_bytes, fed, n_fed, outcome)) {
        return clear_after(all, sequence, outcome);
    }
    bool empty = is_empty(sequences_positions(all, sequence));
    if (header.rows && !empty) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is not empty; clear it first", sequence);
    }
    if (!header.rows && empty) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is empty, the state needs its rows there", sequence);
    }
    if (!import(all, sequence, &header, blob + blob_start(header.n_tokens), outcome)) {
        return clear_after(all, sequence, outcome);
    }
    return true;
}
