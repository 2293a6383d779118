/* The sequences of one llama.cpp context: copy, cut, save, restore. Every rule about what llama.cpp
 * may be asked stands here. Knows no Python; its functions run without the GIL.
 *
 * Callers guarantee: sequence ids within [0, n_sequences), lengths within int32, one call at a time.
 */
#ifndef SEQSTATE_SEQUENCES_H
#define SEQSTATE_SEQUENCES_H

#include "blob.h"

/* The part of llama.h that is used, by address. */
struct llama_calls {
    void *(*get_memory)(const void *context);
    void (*seq_cp)(void *memory, int32_t source, int32_t target, int32_t p0, int32_t p1);
    bool (*seq_rm)(void *memory, int32_t sequence, int32_t p0, int32_t p1);
    int32_t (*pos_min)(void *memory, int32_t sequence);
    int32_t (*pos_max)(void *memory, int32_t sequence);
    void (*memory_clear)(void *memory, bool data);
    size_t (*get_size)(void *context, int32_t sequence, uint32_t flags);
    size_t (*get_data)(void *context, uint8_t *room, size_t n_room, int32_t sequence,
                       uint32_t flags);
    size_t (*set_data)(void *context, const uint8_t *bytes, size_t n_bytes, int32_t sequence,
                       uint32_t flags);
};

struct sequences {
    struct llama_calls llama;
    const struct checksum *sum; /* borrowed; outlives this */
    void *context;
    void *memory;
    int32_t n_sequences;
    enum memory_kind kind;
    struct identity identity;
    uint8_t *empty; /* the recurrent half of an empty sequence; NULL for attention */
    size_t empty_size;
    struct layout layout;
};

struct positions {
    int32_t low;
    int32_t high;
};

/* A request to save: `fed` has 4 * n_fed bytes; `size` is set by sequences_save_size. */
struct save {
    int32_t sequence;
    bool rows;
    const uint8_t *fed;
    size_t n_fed;
    size_t size;
};

/* A request to save the rows [start, end): `fed` has 4 * n_fed bytes, all that the sequence was fed;
 * `size` is set by sequences_slice_begin. */
struct slice {
    int32_t sequence;
    int32_t scratch;
    uint32_t start;
    uint32_t end;
    const uint8_t *fed;
    size_t n_fed;
    size_t size;
};

/* Completes an object whose calls, sum, context, n_sequences, kind and identity are set. What it
 * takes is released by sequences_release, after a failure too. */
bool sequences_open(struct sequences *all, struct outcome *outcome);
void sequences_release(struct sequences *all);

struct positions sequences_positions(const struct sequences *all, int32_t sequence);

/* length < 0: whole. */
bool sequences_copy(struct sequences *all, int32_t source, int32_t target, int64_t length,
                    struct outcome *outcome);
bool sequences_clear(struct sequences *all, int32_t sequence, struct outcome *outcome);
bool sequences_clear_all(struct sequences *all, struct outcome *outcome);
bool sequences_cut(struct sequences *all, int32_t sequence, int32_t length,
                   struct outcome *outcome);
bool sequences_strip(struct sequences *all, int32_t sequence, struct outcome *outcome);
bool sequences_scrub(struct sequences *all, int32_t sequence, struct outcome *outcome);

/* Bytes of a saved state of what the sequence holds now; 0 after a failure. */
size_t sequences_state_size(struct sequences *all, int32_t sequence, bool rows,
                            struct outcome *outcome);

/* Checks the request against what the sequence holds and sets its size. */
bool sequences_save_size(struct sequences *all, struct save *save, struct outcome *outcome);

/* Writes save->size bytes to `room`. */
bool sequences_save(struct sequences *all, const struct save *save, uint8_t *room,
                    struct outcome *outcome);

/* Makes the slice in the scratch sequence and sets its size; after a failure that one is empty. */
bool sequences_slice_begin(struct sequences *all, struct slice *slice, struct outcome *outcome);

/* Writes slice->size bytes to `room`, or nothing for NULL, and empties the scratch sequence. */
bool sequences_slice_end(struct sequences *all, const struct slice *slice, uint8_t *room,
                         struct outcome *outcome);

/* What a restore is given: a blob and the tokens, and which form it is to have, -1 for any that
 * makes a sequence complete. */
struct restore {
    const uint8_t *blob;
    size_t n_bytes;
    const uint8_t *fed;
    size_t n_fed;
    int form;
};

/* Restores a blob saved after these tokens; after a refusal or a full pool the sequence is empty. */
bool sequences_restore(struct sequences *all, int32_t sequence, const struct restore *given,
                       struct outcome *outcome);

/* Appends the rows of a slice to a sequence of `start` rows and sets `n_held` to how many there are
 * then. The scratch sequence is empty afterwards; after a refusal or a full pool the whole sequence
 * is, too. */
bool sequences_append(struct sequences *all, int32_t sequence, int32_t scratch, uint32_t start,
                      const struct restore *given, uint32_t *n_held, struct outcome *outcome);

#endif
