/* CRC-32 as zlib computes it, several times faster where the processor multiplies without carry. */
#ifndef SEQSTATE_CHECKSUM_H
#define SEQSTATE_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct checksum {
    uint32_t table[16][256]; /* table[k][b]: the remainder of byte b followed by k zero bytes */
    uint64_t fold_512[2];    /* multipliers that carry a 128-bit block over 512 bits ... */
    uint64_t fold_128[2];    /* ... and over 128 bits */
    bool carryless;          /* the processor has PCLMULQDQ */
};

/* Computes the tables; they are read-only afterwards and may be shared by threads. */
void checksum_prepare(struct checksum *sum);

/* The CRC-32 of `crc`'s bytes followed by `n_bytes` more; start with 0. Same value as zlib.crc32. */
uint32_t checksum_update(const struct checksum *sum, uint32_t crc, const uint8_t *bytes,
                         size_t n_bytes);

/* Two CRC-32 in one number: of the bytes forwards (low half) and backwards (high half). */
uint64_t checksum_both_ways(const struct checksum *sum, const uint8_t *bytes, size_t n_bytes);

#endif
