/* Two or three columns taken apart: the source is rows of 2 or 3 elements with nothing between them, each column becomes a
 * contiguous row of the destination. Where there is no AVX2, transposes.c does it.
 */
#define COLUMN_BLOCK_BYTES 1024 /* what a stage takes before whole lines leave it */
#define COLUMN_AHEAD_BYTES 4096 /* how far ahead the source is asked for */

#ifdef WB_AVX2
#define PERMUTE_QUARTERS(x, order) _mm256_permute4x64_epi64(x, order)
#define SPLIT_STORE(k, x) _mm256_storeu_si256((__m256i *)(to[k] + i * size), x)
#define SPLIT_LOAD(from, k) _mm256_loadu_si256((const __m256i *)(from) + (k))
#define SPLIT_LOAD_HALVES(from, k) _mm256_loadu2_m128i((const __m128i *)(from) + 3 + (k), (const __m128i *)(from) + (k))

/* The elements at even places of the pair (a, b), then those at odd places. */
WB_AVX2 WB_INLINE void halves_of(__m256i a, __m256i b, __m256i *even, __m256i *odd, const int size) {
    if (size == 1) {
        const __m256i low = _mm256_set1_epi16(0xFF);
        *even = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
        *odd = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    } else if (size == 2) {
        const __m256i low = _mm256_set1_epi32(0xFFFF);
        *even = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
        *odd = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    } else if (size == 4) {
        const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
        *even = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88));
        *odd = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD));
    } else {
        *even = _mm256_unpacklo_epi64(a, b);
        *odd = _mm256_unpackhi_epi64(a, b);
    }
    *even = PERMUTE_QUARTERS(*even, 0xD8);
    *odd = PERMUTE_QUARTERS(*odd, 0xD8);
}

/* Words in this order within each half of a register. */
#define WORDS(x, a, b, c, d, e, f, g, h)                                                                              \
    _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi16(WORD(a), WORD(b), WORD(c), WORD(d), WORD(e),    \
                                                                      WORD(f), WORD(g), WORD(h))))
#define WORD(at) (0x100 * (2 * (at) + 1) + 2 * (at))

/* Every third element of (a, b, c), from the first, second and third on; of 2 bytes, of the lower halves and of the upper ones.
 * No two elements of a column are in the same lane (3 and the 4 or 8 lanes have no factor in common), so they are merged into one
 * register first and put in order then. */
WB_AVX2 WB_INLINE void thirds_of(__m256i a, __m256i b, __m256i c, __m256i *x, __m256i *y, __m256i *z, const int size) {
    if (size == 2) {
        *x = WORDS(_mm256_blend_epi16(_mm256_blend_epi16(a, b, 0x92), c, 0x24), 0, 3, 6, 1, 4, 7, 2, 5);
        *y = WORDS(_mm256_blend_epi16(_mm256_blend_epi16(a, b, 0x24), c, 0x49), 1, 4, 7, 2, 5, 0, 3, 6);
        *z = WORDS(_mm256_blend_epi16(_mm256_blend_epi16(a, b, 0x49), c, 0x92), 2, 5, 0, 3, 6, 1, 4, 7);
    } else if (size == 4) {
        *x = _mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x92), c, 0x24);
        *y = _mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x24), c, 0x49);
        *z = _mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x49), c, 0x92);
        *x = _mm256_permutevar8x32_epi32(*x, _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5));
        *y = _mm256_permutevar8x32_epi32(*y, _mm256_setr_epi32(1, 4, 7, 2, 5, 0, 3, 6));
        *z = _mm256_permutevar8x32_epi32(*z, _mm256_setr_epi32(2, 5, 0, 3, 6, 1, 4, 7));
    } else {
        *x = PERMUTE_QUARTERS(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x30), c, 0x0C), 0x6C);
        *y = PERMUTE_QUARTERS(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0xC3), c, 0x30), 0xB1);
        *z = PERMUTE_QUARTERS(_mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x0C), c, 0xC3), 0xC6);
    }
}

/* n rows into to[0], to[1] and, of three columns, to[2]. */
WB_AVX2 WB_INLINE void split_columns(char *const *to, const char *src, int64_t n, const int columns, const int size) {
    const int64_t lanes = 32 / size;
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const char *from = src + i * columns * size;
        __m256i x, y, z;
        _mm_prefetch(from + COLUMN_AHEAD_BYTES, _MM_HINT_NTA);
        if (columns == 3) _mm_prefetch(from + COLUMN_AHEAD_BYTES + 64, _MM_HINT_NTA);
        if (columns == 2) {
            halves_of(SPLIT_LOAD(from, 0), SPLIT_LOAD(from, 1), &x, &y, size);
        } else {
            if (size == 2)
                thirds_of(SPLIT_LOAD_HALVES(from, 0), SPLIT_LOAD_HALVES(from, 1), SPLIT_LOAD_HALVES(from, 2), &x, &y, &z, size);
            else
                thirds_of(SPLIT_LOAD(from, 0), SPLIT_LOAD(from, 1), SPLIT_LOAD(from, 2), &x, &y, &z, size);
            SPLIT_STORE(2, z);
        }
        SPLIT_STORE(0, x);
        SPLIT_STORE(1, y);
    }
    for (int k = 0; k < columns; k++)
        copy_line(to[k] + i * size, size, src + (i * columns + k) * size, columns * size, n - i, size, 0);
}

/* The same into rows that lie ds apart, past the cache. Each row has a stage, which begins with the cache line in which the next
 * byte of the row belongs. Lines that have become whole leave it, the beginning of the next one stays. Only the first and last
 * line of a row, of which others may own a part, go through the cache. */
WB_AVX2 WB_INLINE void stream_columns(char *dst, int64_t ds, const char *src, int64_t n, const int columns, const int size) {
    char stage[3][COLUMN_BLOCK_BYTES + 128] __attribute__((aligned(64)));
    char *line[3], *to[3];
    int64_t held[3], foreign[3]; /* bytes in the stage; those of them at its beginning that are not this row's */
    for (int k = 0; k < columns; k++) {
        held[k] = foreign[k] = (int64_t)((uintptr_t)(dst + k * ds) & 63);
        line[k] = dst + k * ds - held[k];
    }
    for (int64_t i = 0, block = COLUMN_BLOCK_BYTES / size; i < n; i += block) {
        if (block > n - i) block = n - i;
        for (int k = 0; k < columns; k++) to[k] = stage[k] + held[k];
        split_columns(to, src + i * columns * size, block, columns, size);
        for (int k = 0; k < columns; k++) {
            int64_t end = held[k] + block * size, whole = end & ~(int64_t)63, first = 0;
            held[k] = end - whole;
            if (!whole) continue;
            if (foreign[k]) {
                memcpy(line[k] + foreign[k], stage[k] + foreign[k], (size_t)(64 - foreign[k]));
                foreign[k] = 0, first = 64;
            }
            stream_in_order(line[k] + first, stage[k] + first, whole - first, stage[k]);
            memcpy(stage[k], stage[k] + whole, 64);
            line[k] += whole;
        }
    }
    for (int k = 0; k < columns; k++)
        memcpy(line[k] + foreign[k], stage[k] + foreign[k], (size_t)(held[k] - foreign[k]));
}

WB_AVX2 WB_INLINE void columns_apart(char *dst, int64_t ds, const char *src, int64_t n, int streaming, const int columns,
                                     const int size) {
    char *const to[3] = {dst, dst + ds, dst + 2 * ds};
    if (streaming)
        stream_columns(dst, ds, src, n, columns, size);
    else
        split_columns(to, src, n, columns, size);
}

WB_AVX2 static void two_columns_apart(char *dst, int64_t ds, const char *src, int64_t n, int64_t size, int streaming) {
    switch (size) {
    case 1: columns_apart(dst, ds, src, n, streaming, 2, 1); break;
    case 2: columns_apart(dst, ds, src, n, streaming, 2, 2); break;
    case 4: columns_apart(dst, ds, src, n, streaming, 2, 4); break;
    default: columns_apart(dst, ds, src, n, streaming, 2, 8);
    }
}

WB_AVX2 static void three_columns_apart(char *dst, int64_t ds, const char *src, int64_t n, int64_t size, int streaming) {
    switch (size) {
    case 2: columns_apart(dst, ds, src, n, streaming, 3, 2); break;
    case 4: columns_apart(dst, ds, src, n, streaming, 3, 4); break;
    default: columns_apart(dst, ds, src, n, streaming, 3, 8);
    }
}
#endif

#if WB_SSE2
/* Whether this was a case for the functions above, and is done. Of short columns transposes.c is the faster. */
static int take_columns_apart(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t size,
                              int streaming) {
#ifdef WB_AVX2
    if ((nb != 2 && nb != 3) || ss != nb * size || (nb == 3 && size == 1)) return 0;
    if (na * size < STREAM_RUN_BYTES || vector_bytes() < 32) return 0;
    (nb == 2 ? two_columns_apart : three_columns_apart)(dst, ds, src, na, size, streaming);
    return 1;
#else
    (void)dst, (void)ds, (void)src, (void)ss, (void)na, (void)nb, (void)size, (void)streaming;
    return 0;
#endif
}
#endif
