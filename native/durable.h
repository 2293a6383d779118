/* Files that are replaced whole or not at all. Knows neither Python nor what the bytes mean. */
#ifndef SEQSTATE_DURABLE_H
#define SEQSTATE_DURABLE_H

#include "outcome.h"

#include <stddef.h>
#include <stdint.h>

/* Writes to a temporary file beside `path`, flushes it to the disk, renames it and flushes the
 * folder. On failure the temporary file is gone and `path` is what it was, or, where only the last
 * flush failed, the new file whole. */
bool durable_replace(const char *path, const uint8_t *bytes, size_t n_bytes,
                     struct outcome *outcome);

/* Opens a regular file and tells its size; -1 after a failure. The caller closes it. */
int durable_open(const char *path, uint64_t *size, struct outcome *outcome);

/* Reads exactly n_bytes; a file that ended early is an error. */
bool durable_read(int file, uint8_t *room, size_t n_bytes, struct outcome *outcome);

#endif
