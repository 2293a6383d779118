#include "checksum.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_CARRYLESS 1
#endif

/* x^32 + x^26 + ... + 1 with the bits reversed: bit 31 stands for x^0, bit 0 for x^31. */
static const uint32_t POLYNOMIAL = 0xEDB88320u;

/* The remainder times x, in reversed bits. */
static uint32_t times_x(uint32_t remainder)
{
    return (remainder >> 1) ^ ((remainder & 1u) ? POLYNOMIAL : 0u);
}

/* A multiplier for "carry these bits on by n_bits": x^n_bits mod P. The shift makes up for the bit
 * that a product of two reversed factors lacks (63 bits of product in a 64-bit field). */
static uint64_t power_of_x(unsigned n_bits)
{
    uint32_t remainder = 0x80000000u;
    for (unsigned i = 0; i < n_bits; i++) {
        remainder = times_x(remainder);
    }
    return (uint64_t)remainder << 1;
}

void checksum_prepare(struct checksum *sum)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int bit = 0; bit < 8; bit++) {
            remainder = times_x(remainder);
        }
        sum->table[0][byte] = remainder;
    }
    for (int k = 1; k < 16; k++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t shorter = sum->table[k - 1][byte];
            sum->table[k][byte] = (shorter >> 8) ^ sum->table[0][shorter & 0xFFu];
        }
    }
    /* The first half of a block is 64 bits further from the end than the second, and a multiplier
     * itself adds 32: hence distance + 32 and distance - 32. */
    sum->fold_512[0] = power_of_x(512 + 32);
    sum->fold_512[1] = power_of_x(512 - 32);
    sum->fold_128[0] = power_of_x(128 + 32);
    sum->fold_128[1] = power_of_x(128 - 32);
#ifdef HAVE_CARRYLESS
    sum->carryless = __builtin_cpu_supports("pclmul") != 0;
#else
    sum->carryless = false;
#endif
}

/* Sixteen bytes per round from sixteen tables; `state` is the register, not yet inverted. */
static uint32_t run_tables(const struct checksum *sum, uint32_t state, const uint8_t *bytes,
                           size_t n_bytes)
{
    for (; n_bytes >= 16; bytes += 16, n_bytes -= 16) {
        uint32_t word[4];
        uint32_t next = 0;
        memcpy(word, bytes, sizeof word);
        word[0] ^= state;
        for (int w = 0; w < 4; w++) {
            for (int b = 0; b < 4; b++) {
                next ^= sum->table[15 - 4 * w - b][(word[w] >> (8 * b)) & 0xFFu];
            }
        }
        state = next;
    }
    for (; n_bytes > 0; bytes++, n_bytes--) {
        state = (state >> 8) ^ sum->table[0][(state ^ *bytes) & 0xFFu];
    }
    return state;
}

#ifdef HAVE_CARRYLESS
/* One block carried on by the multipliers' distance, plus the block found there. */
__attribute__((target("pclmul,sse2"))) static inline __m128i carry_on(__m128i block,
                                                                      __m128i multipliers,
                                                                      __m128i there)
{
    __m128i first = _mm_clmulepi64_si128(block, multipliers, 0x00);
    __m128i second = _mm_clmulepi64_si128(block, multipliers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), there);
}

/* Folds whole 64-byte rounds (n_bytes >= 64) into sixteen bytes of the same remainder and gives
 * those to the tables. Four blocks run side by side to hide the multiplier's latency. */
__attribute__((target("pclmul,sse2"))) static uint32_t run_carryless(const struct checksum *sum,
                                                                     uint32_t state,
                                                                     const uint8_t *bytes,
                                                                     size_t n_bytes)
{
    const __m128i by_512 = _mm_loadu_si128((const __m128i *)sum->fold_512);
    const __m128i by_128 = _mm_loadu_si128((const __m128i *)sum->fold_128);
    __m128i lane[4];
    uint8_t folded[16];

    for (int i = 0; i < 4; i++) {
        lane[i] = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
    }
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)state));
    for (bytes += 64, n_bytes -= 64; n_bytes >= 64; bytes += 64, n_bytes -= 64) {
        for (int i = 0; i < 4; i++) {
            __m128i there = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
            lane[i] = carry_on(lane[i], by_512, there);
        }
    }
    for (int i = 1; i < 4; i++) {
        lane[0] = carry_on(lane[0], by_128, lane[i]);
    }
    _mm_storeu_si128((__m128i *)folded, lane[0]);
    return run_tables(sum, 0, folded, sizeof folded);
}
#endif

uint32_t checksum_update(const struct checksum *sum, uint32_t crc, const uint8_t *bytes,
                         size_t n_bytes)
{
    uint32_t state = ~crc;
#ifdef HAVE_CARRYLESS
    if (sum->carryless && n_bytes >= 64) {
        size_t n_rounds = n_bytes & ~(size_t)63;
        state = run_carryless(sum, state, bytes, n_rounds);
        bytes += n_rounds;
        n_bytes -= n_rounds;
    }
#endif
    return ~run_tables(sum, state, bytes, n_bytes);
}

uint64_t checksum_both_ways(const struct checksum *sum, const uint8_t *bytes, size_t n_bytes)
{
    uint32_t backwards = ~0u;
    for (size_t i = n_bytes; i > 0; i--) {
        backwards = (backwards >> 8) ^ sum->table[0][(backwards ^ bytes[i - 1]) & 0xFFu];
    }
    return checksum_update(sum, 0, bytes, n_bytes) | (uint64_t)~backwards << 32;
}
