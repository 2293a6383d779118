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
    if (!rows && all->kind == MEMORY_RECURRENT) {
        fail(outcome, FAULT_ARGUMENT, NULL,
             "rows=False is for memory that has rows, this is recurrent");
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

static bool demand_held(int64_t held, int32_t sequence, size_t n_fed, struct outcome *outcome)
{
    if ((uint64_t)held == n_fed) {
        return true;
    }
    return fail(outcome, FAULT_ARGUMENT, NULL,
                "%zu tokens were given, sequence %" PRId32 " holds %" PRId64, n_fed, sequence,
                held);
}

/* Sets `size` to the bytes llama.cpp writes; none for attention without its rows. */
static bool payload_size(struct sequences *all, int32_t sequence, bool rows, size_t *size,
                         struct outcome *outcome)
{
    *size = 0;
    if (!rows && all->kind == MEMORY_ATTENTION) {
        return true;
    }
    *size = all->llama.get_size(all->context, sequence, rows ? WHOLE : STATE_ONLY);
    if (*size != 0) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "llama.cpp gives no state size for sequence %" PRId32, sequence);
}

size_t sequences_state_size(struct sequences *all, int32_t sequence, bool rows,
                            struct outcome *outcome)
{
    size_t payload = 0;
    int64_t held = savable(all, sequence, rows, outcome);

    if (held < 0 || !payload_size(all, sequence, rows, &payload, outcome)) {
        return 0;
    }
    return (size_t)blob_start((uint64_t)held) + payload;
}

bool sequences_save_size(struct sequences *all, struct save *save, struct outcome *outcome)
{
    size_t payload = 0;
    int64_t held = savable(all, save->sequence, save->rows, outcome);

    if (held < 0 || !demand_held(held, save->sequence, save->n_fed, outcome) ||
        !payload_size(all, save->sequence, save->rows, &payload, outcome)) {
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
        .form = save->rows ? FORM_WHOLE : FORM_STATE,
        .memory = all->kind,
        .identity = all->identity,
        .n_tokens = (uint32_t)save->n_fed,
        .payload_length = save->size - start,
    };

    if ((save->rows || all->kind != MEMORY_ATTENTION) &&
        !get(all, save->sequence, save->rows ? WHOLE : STATE_ONLY, room + start,
             save->size - start, outcome)) {
        return false;
    }
    if (!layout_check(&all->layout, room + start, save->size - start, header.n_tokens, outcome)) {
        return false;
    }
    blob_seal(&header, all->sum, room, save->fed);
    return true;
}

/* --- saving in slices -------------------------------------------------------------------------- */

static bool check_scratch(const struct sequences *all, int32_t sequence, int32_t scratch,
                          struct outcome *outcome)
{
    if (all->kind == MEMORY_RECURRENT) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "rows can be moved where there are any, this memory is recurrent");
    }
    if (!all->identity.number[3]) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "rows can be moved in part only when the cells are unified");
    }
    if (sequence == scratch) {
        return fail(outcome, FAULT_ARGUMENT, NULL, "sequence and scratch are both %" PRId32,
                    sequence);
    }
    if (!is_empty(sequences_positions(all, scratch))) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "scratch sequence %" PRId32 " is not empty; clear it first", scratch);
    }
    return true;
}

/* The number of rows of a sequence, by the caller's word where it does not show; -1 after a
 * failure. */
static int64_t sliceable(const struct sequences *all, const struct slice *slice,
                         struct outcome *outcome)
{
    struct positions held = sequences_positions(all, slice->sequence);

    if (all->kind == MEMORY_HYBRID && held.low >= 0 && held.high == -1) {
        return (int64_t)slice->n_fed;
    }
    return savable(all, slice->sequence, true, outcome);
}

bool sequences_slice_begin(struct sequences *all, struct slice *slice, struct outcome *outcome)
{
    size_t payload = 0;

    if (!check_scratch(all, slice->sequence, slice->scratch, outcome)) {
        return false;
    }
    int64_t held = sliceable(all, slice, outcome);
    if (held < 0 || !demand_held(held, slice->sequence, slice->n_fed, outcome)) {
        return false;
    }
    if (slice->start >= slice->end || slice->end > held) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "rows %" PRIu32 " to %" PRIu32 " are none of sequence %" PRId32
                    ", which holds %" PRId64,
                    slice->start, slice->end, slice->sequence, held);
    }
    all->llama.seq_cp(all->memory, slice->sequence, slice->scratch, (int32_t)slice->start,
                      (int32_t)slice->end);
    if ((all->kind == MEMORY_HYBRID && !strip(all, slice->scratch, outcome)) ||
        !payload_size(all, slice->scratch, true, &payload, outcome)) {
        return clear_after(all, slice->scratch, outcome);
    }
    slice->size = (size_t)blob_start(slice->end - slice->start) + payload;
    return true;
}

bool sequences_slice_end(struct sequences *all, const struct slice *slice, uint8_t *room,
                         struct outcome *outcome)
{
    uint32_t n_rows = slice->end - slice->start;
    size_t start = (size_t)blob_start(n_rows);
    struct header header = {
        .form = FORM_ROWS,
        .memory = all->kind,
        .identity = all->identity,
        .start = slice->start,
        .n_tokens = slice->end,
        .payload_length = slice->size - start,
    };
    bool done = true;

    if (room != NULL) {
        done = get(all, slice->scratch, WHOLE, room + start, slice->size - start, outcome) &&
               slice_check(room + start, slice->size - start, n_rows, all->empty, all->empty_size,
                           outcome);
    }
    if (!sequences_clear(all, slice->scratch, outcome) || !done) {
        return false;
    }
    if (room != NULL) {
        blob_seal(&header, all->sum, room, slice->fed);
    }
    return true;
}

/* --- restoring --------------------------------------------------------------------------------- */

/* Everything that can be told before llama.cpp sees a byte. */
static bool check_fit(const struct sequences *all, struct header *header,
                      const struct restore *given, struct outcome *outcome)
{
    if (!blob_verify(header, all->sum, given->blob, given->n_bytes, outcome)) {
        return false;
    }
    if (given->form >= 0 || header->form == FORM_ROWS) {
        enum blob_form wanted = given->form >= 0 ? (enum blob_form)given->form : FORM_WHOLE;
        if (!blob_demand_form(header, wanted, outcome)) {
            return false;
        }
    }
    return blob_belongs(header, all->kind, &all->identity, outcome) &&
           blob_compare_tokens(given->blob, header, all->sum, given->fed, given->n_fed, outcome) &&
           layout_check(&all->layout, given->blob + blob_start(header->n_tokens),
                        header->payload_length, header->n_tokens, outcome);
}

static bool check_restored(struct sequences *all, int32_t sequence, const struct header *header,
                           struct outcome *outcome)
{
    int32_t last = (int32_t)header->n_tokens - 1;

    if (header->form == FORM_STATE && sequences_positions(all, sequence).high < last) {
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
    bool whole = header->form == FORM_WHOLE;

    if ((!whole && all->kind == MEMORY_ATTENTION) ||
        set(all, sequence, whole ? WHOLE : STATE_ONLY, payload, (size_t)header->payload_length)) {
        return check_restored(all, sequence, header, outcome);
    }
    if (whole && all->kind != MEMORY_RECURRENT) {
        return fail(outcome, FAULT_FULL, NULL,
                    "the pool has no %" PRIu32 " free cells for the saved state; "
                    "clear a sequence and try again",
                    header->n_tokens);
    }
    return fail(outcome, FAULT_REFUSED, "payload",
                "llama.cpp refused the saved state; read the prompt again instead");
}

bool sequences_restore(struct sequences *all, int32_t sequence, const struct restore *given,
                       struct outcome *outcome)
{
    struct header header;

    if (!check_fit(all, &header, given, outcome)) {
        return clear_after(all, sequence, outcome);
    }
    bool empty = is_empty(sequences_positions(all, sequence));
    if (header.form == FORM_WHOLE && !empty) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is not empty; clear it first", sequence);
    }
    if (header.form == FORM_STATE && empty) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is empty, the state needs its rows there", sequence);
    }
    if (!import(all, sequence, &header, given->blob + blob_start(header.n_tokens), outcome)) {
        return clear_after(all, sequence, outcome);
    }
    return true;
}

/* --- restoring in slices ----------------------------------------------------------------------- */

/* Refuses a sequence of which it can be seen that it does not hold the rows [0, start). */
static bool check_target(const struct sequences *all, int32_t sequence, uint32_t start,
                         struct outcome *outcome)
{
    struct positions held = sequences_positions(all, sequence);
    bool hybrid = all->kind == MEMORY_HYBRID;

    if (start == 0 && !is_empty(held)) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is not empty; clear it first", sequence);
    }
    if (hybrid && held.high >= 0) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " has its state at %" PRId32 "; clear it first", sequence,
                    held.low);
    }
    if (hybrid && start > 0 && held.low < 0) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " is empty, it lacks the rows before %" PRIu32, sequence,
                    start);
    }
    if (held.high >= (int64_t)start) {
        return fail(outcome, FAULT_ARGUMENT, NULL,
                    "sequence %" PRId32 " holds rows to %" PRId32 ", a slice from %" PRIu32
                    " on overlaps them",
                    sequence, held.high, start);
    }
    return true;
}

/* A slice that belongs to this context, these tokens and this place. */
static bool check_slice(const struct sequences *all, struct header *header, uint32_t start,
                        const struct restore *given, struct outcome *outcome)
{
    if (!blob_verify(header, all->sum, given->blob, given->n_bytes, outcome) ||
        !blob_demand_form(header, FORM_ROWS, outcome) ||
        !blob_belongs(header, all->kind, &all->identity, outcome)) {
        return false;
    }
    if (header->start != start) {
        return fail(outcome, FAULT_REFUSED, "start",
                    "the saved rows begin at %" PRIu32 ", needed are those from %" PRIu32,
                    header->start, start);
    }
    return blob_compare_tokens(given->blob, header, all->sum, given->fed, given->n_fed, outcome) &&
           slice_check(given->blob + blob_start(header_n_ids(header)), header->payload_length,
                       header_n_ids(header), all->empty, all->empty_size, outcome);
}

/* Refuses rows of another place. A slice left behind by its window shows none at all. */
static bool check_place(const struct sequences *all, struct positions held,
                        const struct header *header, struct outcome *outcome)
{
    bool sound;

    if (all->kind == MEMORY_HYBRID) {
        sound = held.low >= (int64_t)header->start && held.high == -1;
    } else {
        sound = held.high < (int64_t)header->n_tokens &&
                (held.high == -1 || held.low >= (int64_t)header->start);
    }
    if (sound) {
        return true;
    }
    return fail(outcome, FAULT_REFUSED, "positions",
                "the saved rows lie at (%" PRId32 ", %" PRId32 "), needed are %" PRIu32
                " to %" PRIu32 "; read the prompt again instead",
                held.low, held.high, header->start, header->n_tokens);
}

/* Brings the rows into the scratch sequence and lets the target share them. */
static bool join(struct sequences *all, int32_t sequence, int32_t scratch,
                 const struct header *header, const uint8_t *payload, struct outcome *outcome)
{
    if (!set(all, scratch, WHOLE, payload, (size_t)header->payload_length)) {
        return fail(outcome, FAULT_FULL, NULL,
                    "the pool has no %" PRIu32 " free cells for the saved rows; "
                    "clear a sequence and try again",
                    header_n_ids(header));
    }
    struct positions held = sequences_positions(all, scratch);
    if (!check_place(all, held, header, outcome)) {
        return false;
    }
    all->llama.seq_cp(all->memory, scratch, sequence, (int32_t)header->start,
                      (int32_t)header->n_tokens);
    if (!sequences_clear(all, scratch, outcome)) {
        return false;
    }
    struct positions there = sequences_positions(all, sequence);
    if (all->kind == MEMORY_HYBRID ? there.low >= 0
                                   : (there.high == held.high || held.high < 0)) {
        return true;
    }
    return fail(outcome, FAULT_BACKEND, NULL,
                "sequence %" PRId32 " holds (%" PRId32 ", %" PRId32 ") after rows were added to it",
                sequence, there.low, there.high);
}

bool sequences_append(struct sequences *all, int32_t sequence, int32_t scratch, uint32_t start,
                      const struct restore *given, uint32_t *n_held, struct outcome *outcome)
{
    struct header header;

    if (!check_scratch(all, sequence, scratch, outcome) ||
        !check_target(all, sequence, start, outcome)) {
        return false;
    }
    if (!check_slice(all, &header, start, given, outcome) ||
        !join(all, sequence, scratch, &header, given->blob + blob_start(header_n_ids(&header)),
              outcome)) {
        sequences_clear(all, scratch, outcome);
        return clear_after(all, sequence, outcome);
    }
    *n_held = header.n_tokens;
    return true;
}
