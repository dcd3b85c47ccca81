/* Transposes of elements of 1, 2, 4 or 8 bytes: the source is contiguous along b, the destination along a.
 *
 * The unit is a tile of n x n elements, n = 16 / size: n loads of 16 bytes, log2(n) rounds of interleaving, n stores of 16
 * bytes. What a row or column of tiles does not cover is covered by one more tile that overlaps the last: it stores the same
 * values again. Bytes read beyond a short row of the source are thrown away; they never lie outside the whole of it.
 *
 * Long destination rows are gathered in a stage first and leave it in runs of whole cache lines. Source rows that lie a power
 * of two apart would push each other (and destination rows likewise) out of the nearest cache before their lines are used up.
 */
#define STAGE_ROWS 256       /* elements along a in a stage of 64 bytes of b */
#define LONG_STAGE_ROWS 1024 /* the same where b is shorter than a tile */
#define STAGE_PAD 64         /* keeps the stage's own rows apart in the cache */
#define DENSE_STAGE_BYTES 8192 /* of short destination rows, which are dense in it */
#define AHEAD_ROWS 32        /* how many source rows ahead lines are asked for */
#define DIRECT_ROW_BYTES 128 /* destination rows up to here need no stage; nor do dense ones that would not stream */

static void transpose_plain(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t size) {
    for (int64_t b = 0; b < nb; b++) copy_line(dst + b * ds, size, src + b * size, ss, na, size, 0);
}

#if WB_SSE2
WB_INLINE __m128i interleave_low(__m128i a, __m128i b, const int size) {
    return size == 1 ? _mm_unpacklo_epi8(a, b) : size == 2 ? _mm_unpacklo_epi16(a, b) : size == 4 ? _mm_unpacklo_epi32(a, b)
                                                                              : _mm_unpacklo_epi64(a, b);
}

WB_INLINE __m128i interleave_high(__m128i a, __m128i b, const int size) {
    return size == 1 ? _mm_unpackhi_epi8(a, b) : size == 2 ? _mm_unpackhi_epi16(a, b) : size == 4 ? _mm_unpackhi_epi32(a, b)
                                                                              : _mm_unpackhi_epi64(a, b);
}

/* `rows` of the n source rows are read; the columns of the others hold anything. Stores go from low to high addresses of b. */
WB_INLINE void tile(char *dst, int64_t ds, const char *src, int64_t ss, int64_t rows, const int size) {
    const int n = 16 / size;
    __m128i r[16], t[16];
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) r[k] = _mm_loadu_si128((const __m128i *)(src + (k < rows ? k : 0) * ss));
#pragma GCC unroll 4
    for (int width = 1; width < n; width *= 2) {
#pragma GCC unroll 8
        for (int k = 0; k < n / 2; k++) {
            t[2 * k] = interleave_low(r[k], r[k + n / 2], size);
            t[2 * k + 1] = interleave_high(r[k], r[k + n / 2], size);
        }
#pragma GCC unroll 16
        for (int k = 0; k < n; k++) r[k] = t[k];
    }
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) _mm_storeu_si128((__m128i *)(dst + k * ds), r[k]);
}

/* n source rows of which the first n / 2 elements count: half the work. */
WB_INLINE void half_tile(char *dst, int64_t ds, const char *src, int64_t ss, const int size) {
    const int n = 16 / size, m = n / 2;
    __m128i r[16], t[16];
#pragma GCC unroll 8
    for (int k = 0; k < m; k++)
        r[k] = interleave_low(_mm_loadu_si128((const __m128i *)(src + k * ss)),
                              _mm_loadu_si128((const __m128i *)(src + (k + m) * ss)), size);
#pragma GCC unroll 4
    for (int width = 1; width < m; width *= 2) {
#pragma GCC unroll 4
        for (int k = 0; k < m / 2; k++) {
            t[2 * k] = interleave_low(r[k], r[k + m / 2], size);
            t[2 * k + 1] = interleave_high(r[k], r[k + m / 2], size);
        }
#pragma GCC unroll 8
        for (int k = 0; k < m; k++) r[k] = t[k];
    }
#pragma GCC unroll 8
    for (int k = 0; k < m; k++) _mm_storeu_si128((__m128i *)(dst + k * ds), r[k]);
}

/* Destination rows shorter than a tile, one right after the other: each store spills over into the rows after it, which are
 * written later. The last ones, whose spill would leave the destination, go element by element. */
WB_INLINE void transpose_short_rows(char *dst, const char *src, int64_t ss, int64_t na, int64_t nb, const int size) {
    const int64_t n = 16 / size, row = na * size, safe = nb * row < 16 ? 0 : (nb * row - 16) / row + 1;
    int64_t b = 0;
    if (na == 2) {
        for (; b + n <= nb; b += n) {
            __m128i x = _mm_loadu_si128((const __m128i *)(src + b * size));
            __m128i y = _mm_loadu_si128((const __m128i *)(src + ss + b * size));
            _mm_storeu_si128((__m128i *)(dst + b * row), interleave_low(x, y, size));
            _mm_storeu_si128((__m128i *)(dst + b * row + 16), interleave_high(x, y, size));
        }
    } else if (safe >= n) {
        for (; b + n <= safe; b += n) tile(dst + b * row, row, src + b * size, ss, na, size);
        if (b < safe) tile(dst + (safe - n) * row, row, src + (safe - n) * size, ss, na, size), b = safe;
    }
    transpose_plain(dst + b * row, row, src + b * size, ss, na, nb - b, size);
}

/* na >= n, and nb >= n unless `readable` (how many source rows may be read 16 bytes wide) says less than na. */
WB_INLINE void transpose_block(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t readable,
                               const int size) {
    const int64_t n = 16 / size, far = ss > 128 || ss < -128;
    for (int64_t a0 = 0; a0 < readable; a0 += n) {
        int64_t a = a0 + n <= readable ? a0 : readable - n;
        if (nb <= n / 2) {
            half_tile(dst + a * size, ds, src + a * ss, ss, size);
            continue;
        }
        if (far && nb >= n && n < 16) {
            int64_t later = a0 + AHEAD_ROWS, turn = later < readable ? 0 : 64; /* then in the next 64 bytes of the rows */
            const char *asked = src + (turn ? later - readable : later) * ss + turn;
            for (int k = 0; k < n; k++) _mm_prefetch(asked + k * ss, _MM_HINT_T0);
        }
        for (int64_t b0 = 0; b0 < nb; b0 += n) {
            int64_t b = b0 + n <= nb || nb < n ? b0 : nb - n;
            tile(dst + b * ds + a * size, ds, src + a * ss + b * size, ss, n, size);
        }
    }
    if (readable < na)
        transpose_plain(dst + readable * size, ds, src + readable * ss, ss, na - readable, nb, size);
}

WB_INLINE void transpose_staged(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int streaming,
                                const int size, const int stage_rows) {
    const int64_t n = 16 / size, block_b = 64 / size, pitch = stage_rows * size + STAGE_PAD;
    char stage[16 * 1024 + 64 * STAGE_PAD] __attribute__((aligned(64)));
    const int64_t blocks = (na + stage_rows - 1) / stage_rows, block_a = ((na + blocks - 1) / blocks + 63) / 64 * 64;
    /* Only rows shorter than a tile are read beyond their end; the last of them would be read beyond the whole source. */
    const int64_t spill = nb < n ? (16 - nb * size + ss - 1) / ss : 0;
    for (int64_t a0 = 0; a0 < na; a0 += block_a) {
        int64_t a = na - a0 >= n ? a0 : na - n, rows = na - a < block_a ? na - a : block_a;
        int64_t readable = na - spill - a < rows ? na - spill - a : rows;
        if (readable < n) readable = 0;
        for (int64_t b0 = 0; b0 < nb; b0 += block_b) {
            int64_t b = nb - b0 >= n || nb < n ? b0 : nb - n, columns = nb - b < block_b ? nb - b : block_b;
            transpose_block(stage, pitch, src + a * ss + b * size, ss, rows, columns, readable, size);
            for (int64_t i = 0; i < columns; i++)
                copy_run(dst + (b + i) * ds + a * size, stage + i * pitch, rows * size, streaming, stage, 0);
        }
    }
}

WB_INLINE void transpose_sized(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int streaming,
                               const int size) {
    const int64_t n = 16 / size, block_b = 64 / size;
    if (nb == 2 && ss == 2 * size) {
        for (int64_t a = 0; a < na; a += 1024) /* both passes find the source in the nearest cache */
            transpose_plain(dst + a * size, ds, src + a * ss, ss, na - a < 1024 ? na - a : 1024, nb, size);
    } else if (na < n) {
        if (ds == na * size)
            transpose_short_rows(dst, src, ss, na, nb, size);
        else
            transpose_plain(dst, ds, src, ss, na, nb, size);
    } else if (nb < n && ss <= 0) {
        transpose_plain(dst, ds, src, ss, na, nb, size);
    } else if (nb >= n && (na * size <= DIRECT_ROW_BYTES || (ds == na * size && !streams(dst, na * size)))) {
        for (int64_t b0 = 0; b0 < nb; b0 += block_b) {
            int64_t b = nb - b0 >= n ? b0 : nb - n;
            transpose_block(dst + b * ds, ds, src + b * size, ss, na, nb - b < block_b ? nb - b : block_b, na, size);
        }
    } else if (nb < n) {
        transpose_staged(dst, ds, src, ss, na, nb, streaming, size, LONG_STAGE_ROWS);
    } else {
        transpose_staged(dst, ds, src, ss, na, nb, streaming, size, STAGE_ROWS);
    }
}

/* Not inlined: of two copies of all that is above both would be slower. */
WB_NOINLINE static void transpose_any(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb,
                                      int streaming, int64_t size) {
    switch (size) {
    case 1: transpose_sized(dst, ds, src, ss, na, nb, streaming, 1); break;
    case 2: transpose_sized(dst, ds, src, ss, na, nb, streaming, 2); break;
    case 4: transpose_sized(dst, ds, src, ss, na, nb, streaming, 4); break;
    default: transpose_sized(dst, ds, src, ss, na, nb, streaming, 8);
    }
}

/* Short destination rows, one right after the other: gathered in a stage, they leave it in whole cache lines. */
static void transpose_through_stage(char *dst, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t size) {
    char stage[DENSE_STAGE_BYTES] __attribute__((aligned(64)));
    const int64_t row = na * size, block = DENSE_STAGE_BYTES / row & ~(int64_t)63;
    for (int64_t b = 0; b < nb; b += block) {
        int64_t rows = nb - b < block ? nb - b : block;
        transpose_any(stage, row, src + b * size, ss, na, rows, 0, size);
        copy_streaming(dst + b * row, stage, rows * row, stage, 0);
    }
}

static void transpose(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t size,
                      int streaming) {
    if (take_columns_apart(dst, ds, src, ss, na, nb, size, streaming)) return;
    if (streaming && ds == na * size && ds >= 16 && ds <= DIRECT_ROW_BYTES && nb * ds >= 4 * DENSE_STAGE_BYTES) {
        transpose_through_stage(dst, src, ss, na, nb, size);
        return;
    }
    transpose_any(dst, ds, src, ss, na, nb, streaming, size);
}
#else
static void transpose(char *dst, int64_t ds, const char *src, int64_t ss, int64_t na, int64_t nb, int64_t size,
                      int streaming) {
    (void)streaming;
    const int64_t block = 64; /* the source lines of a block are used up while they are near */
    for (int64_t a = 0; a < na; a += block)
        transpose_plain(dst + a * size, ds, src + a * ss, ss, na - a < block ? na - a : block, nb, size);
}
#endif
