/* Second differences modulo p of a field of coded elements, and the runs of elements that hold no code.
 *
 * The native form of probe/difference.py and probe/constants.py, which are the specification. Per column it keeps the
 * residue predicted for the next row and the slope, 4 bytes. A row that is as predicted costs a comparison and an addition
 * modulo p an element; only a block of a row that differs is differenced, first along the rows (its distance from the
 * prediction is that difference), then along the columns. Everything fits 16-bit lanes, since p < 2**14, and is written as
 * plain loops that compilers vectorise.
 *
 * All functions are inlined into wb_difference_plain and, where the compiler can, into a copy for AVX2. (AVX-512 brings more
 * on rows that differ and less on the others.)
 */
#define BLOCK 1024 /* columns that stay in the first-level cache between the comparison and the slow path */
#define SCAN 64    /* elements looked at together for something rare */
#define INLINE static inline __attribute__((always_inline))
#define NO_CODE 0xFFFF

#if defined(WB_SSE2) && defined(__GNUC__)
#define WB_WIDE __attribute__((target("avx2")))
#endif

/* x modulo p for x < 2p, all 16 bits wide: below p the subtraction wraps to something larger. */
INLINE uint16_t reduce(uint16_t x, uint16_t p) {
    uint16_t y = (uint16_t)(x - p);
    return x < y ? x : y;
}

INLINE uint64_t load_bits(const char *at, int itemsize) {
    switch (itemsize) {
    case 1: return *(const uint8_t *)at;
    case 2: return *(const u16 *)at;
    case 4: return *(const u32 *)at;
    default: return *(const u64 *)at;
    }
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

#define DECODE_LINE(type, wide)                                                                                       \
    for (int64_t i = 0; i < n; i++) {                                                                                 \
        wide raw = *(const type *)(at + i * step);                                                                    \
        wide code = (wide)((raw >> shift) - (wide)first);                                                             \
        codes[i] = (raw & low_bits) == 0 && code < (wide)p ? (uint16_t)code : NO_CODE;                                \
    }

/* Codes of n elements of any size and step, without those of contiguous 16-bit ones, which need no copy. */
INLINE void decode(const wb_field *f, const char *at, int64_t n, uint16_t *restrict codes) {
    const int shift = f->shift;
    const int64_t step = f->col_step;
    const uint64_t first = f->first, p = (uint64_t)f->modulus;
    switch (f->itemsize) {
    case 1: {
        const uint32_t low_bits = (1u << shift) - 1;
        DECODE_LINE(uint8_t, uint32_t)
        break;
    }
    case 2: {
        const uint32_t low_bits = (1u << shift) - 1;
        DECODE_LINE(u16, uint32_t)
        break;
    }
    case 4: {
        const uint32_t low_bits = (1u << shift) - 1;
        if (step == 4)
            for (int64_t i = 0; i < n; i++) {
                uint32_t raw = ((const u32 *)at)[i], code = (raw >> shift) - (uint32_t)first;
                code |= (raw & low_bits) ? NO_CODE : 0;
                codes[i] = (uint16_t)(code < (uint32_t)p ? code : NO_CODE);
            }
        else
            DECODE_LINE(u32, uint32_t)
        break;
    }
    default: {
        const uint64_t low_bits = (1ull << shift) - 1;
        DECODE_LINE(u64, uint64_t)
    }
    }
}

/* --- one block of one row ----------------------------------------------------------------------------------------- */

/* Whether any code differs from its prediction; the predictions move on to the next row either way. */
INLINE unsigned compare_and_advance(const u16 *restrict raw, uint16_t *restrict predicted,
                                    const uint16_t *restrict slope, int64_t n, uint16_t first, uint16_t p) {
    uint16_t differs = 0;
    for (int64_t i = 0; i < n; i++) {
        differs |= (uint16_t)((uint16_t)(raw[i] - first) ^ predicted[i]);
        predicted[i] = reduce((uint16_t)(predicted[i] + slope[i]), p);
    }
    return differs;
}

INLINE void step_back(uint16_t *restrict predicted, const uint16_t *restrict slope, int64_t n, uint16_t p) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t before = (uint16_t)(predicted[i] - slope[i]), wrapped = (uint16_t)(before + p);
        predicted[i] = before < wrapped ? before : wrapped;
    }
}

/* Distances from the predictions into d, the state moved on. Returns bit 0: some distance; bit 1: some element no code. */
INLINE unsigned difference_rows(const u16 *restrict raw, uint16_t *restrict predicted, uint16_t *restrict slope,
                                uint16_t *restrict d, int64_t n, uint16_t first, uint16_t p) {
    uint16_t some = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t code = (uint16_t)(raw[i] - first);
        most = code > most ? code : most;
        uint16_t value = code < p ? code : 0;
        uint16_t low = (uint16_t)(value - predicted[i]), high = (uint16_t)(low + p);
        uint16_t distance = low < high ? low : high;
        some |= distance;
        d[i] = distance;
        slope[i] = reduce((uint16_t)(slope[i] + distance), p);
        predicted[i] = reduce((uint16_t)(value + slope[i]), p);
    }
    return (some != 0) | (unsigned)(most >= p) << 1;
}

/* d[i] - 2 d[i - 1] + d[i - 2] of SCAN elements: is any of them no multiple of p? */
INLINE unsigned any_difference(const uint16_t *d, int64_t n, uint16_t p) {
    uint16_t some = 0;
    for (int64_t i = 0; i < n; i++) {
        int16_t x = (int16_t)(uint16_t)(d[i] + d[i - 2] - 2 * d[i - 1]);
        uint16_t size = (uint16_t)(x < 0 ? -x : x); /* below 2p: 0 and p are the multiples of p */
        some |= reduce(size, p);
    }
    return some;
}

INLINE void difference_cols(wb_field *f, const uint16_t *d, int64_t n, int64_t position) {
    const int p = f->modulus;
    for (int64_t lo = 0; lo < n; lo += SCAN) {
        int64_t hi = lo + SCAN < n ? lo + SCAN : n;
        if (!(hi - lo == SCAN ? any_difference(d + lo, SCAN, (uint16_t)p) : any_difference(d + lo, hi - lo, (uint16_t)p)))
            continue;
        for (int64_t i = lo; i < hi; i++) {
            int x = d[i] + d[i - 2] - 2 * d[i - 1];
            x += x < 0 ? p : 0;
            x += x < 0 ? p : 0;
            x -= x >= p ? p : 0;
            if (x == 0) continue;
            f->entry_position[f->num_entries] = position + i;
            f->entry_residue[f->num_entries++] = (uint16_t)x;
        }
    }
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

INLINE unsigned all_equal(const u16 *raw, uint16_t bits) {
    uint16_t differs = 0;
    for (int64_t i = 0; i < SCAN; i++) differs |= (uint16_t)(raw[i] ^ bits);
    return !differs;
}

INLINE unsigned all_codes(const u16 *raw, uint16_t first, uint16_t p) {
    uint16_t most = 0;
    for (int64_t i = 0; i < SCAN; i++) {
        uint16_t code = (uint16_t)(raw[i] - first);
        most = code > most ? code : most;
    }
    return most < p;
}

/* raw - first are the codes of n elements whose bits lie at `at`. Joins the last run where it goes on. */
INLINE void add_runs(wb_field *f, const u16 *raw, uint16_t first, const char *at, int64_t n, int64_t position) {
    const uint16_t p = (uint16_t)f->modulus;
    const int contiguous_16 = (const char *)raw == at;
    int64_t i = 0, last = f->num_runs - 1;
    while (i < n) {
        if (n - i >= SCAN) {
            if (all_codes(raw + i, first, p)) {
                i += SCAN;
                continue;
            }
            if (contiguous_16 && last >= 0 && f->run_start[last] + f->run_length[last] == position + i &&
                all_equal(raw + i, (uint16_t)f->run_bits[last])) {
                f->run_length[last] += SCAN;
                i += SCAN;
                continue;
            }
        }
        for (int64_t end = n - i < SCAN ? n : i + SCAN; i < end; i++) {
            if ((uint16_t)(raw[i] - first) < p) continue;
            uint64_t bits = load_bits(at + i * f->col_step, f->itemsize);
            if (last >= 0 && f->run_start[last] + f->run_length[last] == position + i && f->run_bits[last] == bits) {
                f->run_length[last]++;
                continue;
            }
            last = f->num_runs++;
            f->run_start[last] = position + i;
            f->run_length[last] = 1;
            f->run_bits[last] = bits;
        }
    }
}

/* --- a field ------------------------------------------------------------------------------------------------------ */

INLINE int64_t difference(wb_field *f, int64_t row, int direct) {
    uint16_t codes[BLOCK], with_carry[BLOCK + 2], *d = with_carry + 2;
    const uint16_t p = (uint16_t)f->modulus, first = direct ? (uint16_t)f->first : 0;
    for (; row < f->rows; row++) {
        if (f->max_entries - f->num_entries < f->cols || f->max_runs - f->num_runs < f->cols) break;
        const char *at = f->start + row * f->row_step;
        int64_t position = (f->first_row + row) * f->cols;
        d[-1] = d[-2] = 0;
        for (int64_t lo = 0, block = 0; lo < f->cols; lo += BLOCK, block++) {
            int64_t n = f->cols - lo < BLOCK ? f->cols - lo : BLOCK;
            const char *here = at + lo * f->col_step;
            const u16 *raw = (const u16 *)here;
            if (!direct) {
                decode(f, here, n, codes);
                raw = (const u16 *)codes;
            }
            uint16_t *predicted = f->predicted + lo, *slope = f->slope + lo;
            if (!f->was_slow[block]) {
                if (!compare_and_advance(raw, predicted, slope, n, first, p)) {
                    if (d[-1] | d[-2]) { /* what the block before leaves over is differenced with zeros */
                        d[0] = d[1] = 0;
                        difference_cols(f, d, n < 2 ? n : 2, position + lo);
                        d[-2] = n == 1 ? d[-1] : 0;
                        d[-1] = 0;
                    }
                    continue;
                }
                step_back(predicted, slope, n, p);
            }
            unsigned seen = difference_rows(raw, predicted, slope, d, n, first, p);
            f->was_slow[block] = seen & 1; /* rows that differ come in groups: the next one need not be compared first */
            if ((seen & 1) || d[-1] || d[-2]) difference_cols(f, d, n, position + lo);
            if (seen & 2) add_runs(f, raw, first, here, n, position + lo);
            d[-2] = d[n - 2], d[-1] = d[n - 1]; /* n == 1: d[-1] moves to d[-2] */
        }
    }
    return row;
}

INLINE int64_t difference_any(wb_field *f, int64_t row) {
    if (f->itemsize == 2 && f->col_step == 2 && f->shift == 0) return difference(f, row, 1);
    return difference(f, row, 0);
}

static int64_t wb_difference_plain(wb_field *f, int64_t row) { return difference_any(f, row); }

#ifdef WB_WIDE
WB_WIDE static int64_t wb_difference_wide(wb_field *f, int64_t row) { return difference_any(f, row); }
#endif

/* Goes on at `row` of the rows at f->start; returns the row it stopped at: all done, or no room for one more row's finds.
 * wide: use wider vectors where the processor has them. */
int64_t wb_difference(wb_field *f, int64_t row, int wide) {
#ifdef WB_WIDE
    if (wide && __builtin_cpu_supports("avx2")) return wb_difference_wide(f, row);
#endif
    (void)wide;
    return wb_difference_plain(f, row);
}
