/* Strided copies and casts over a descriptor table: the native form of reference.py, which is the specification.
 *
 * wb_prepare turns each row into `wb_copy` records: absolute addresses, axes sorted by destination stride and merged,
 * contiguous inner axes folded into one run, large rows cut into pieces, pieces gathered into batches of about 1 MiB.
 * wb_launch lets one or two threads draw batches from a counter. It allocates nothing.
 */
#include <pthread.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#define WB_SSE2 1
#endif
#if defined(WB_SSE2) && defined(__GNUC__)
#define WB_F16C 1
#define WB_AVX2 __attribute__((target("avx2,f16c")))
#endif

#define PIECE_BYTES (2 << 20)
#define BATCH_BYTES (1 << 20)
#define ROW_COST_BYTES 64    /* what one row costs beside its bytes, in bytes of copying */
#define STREAM_RUN_BYTES 1024
#define STREAM_WRITES_BYTES (4 << 20)

enum {
    COPY, F32_TO_BF16, BF16_TO_F32, F32_TO_F16, F16_TO_F32, BF16_TO_F16, F16_TO_BF16,
    F64_TO_F32, F32_TO_F64, F64_TO_BF16, BF16_TO_F64, F64_TO_F16, F16_TO_F64
};
enum { KIND_RUN, KIND_STRIDED, KIND_TRANSPOSE, KIND_CAST };

/* Live tensors and slots give no alignment promise, and x86 and arm64 need none. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

/* --- preparing ---------------------------------------------------------------------------------------------------- */

static void swap_axes(wb_copy *c, int i, int j) {
    int64_t t;
    t = c->count[i], c->count[i] = c->count[j], c->count[j] = t;
    t = c->src_stride[i], c->src_stride[i] = c->src_stride[j], c->src_stride[j] = t;
    t = c->dst_stride[i], c->dst_stride[i] = c->dst_stride[j], c->dst_stride[j] = t;
}

/* Keep axes longer than 1, make destination strides positive, sort by them (largest first), merge neighbours. */
static void simplify_axes(wb_copy *c) {
    int n = 0;
    for (int i = 0; i < 6; i++) {
        if (c->count[i] == 1) continue;
        swap_axes(c, n, i);
        if (c->dst_stride[n] < 0) {
            c->dst += c->dst_stride[n] * (c->count[n] - 1);
            c->src += c->src_stride[n] * (c->count[n] - 1);
            c->dst_stride[n] = -c->dst_stride[n];
            c->src_stride[n] = -c->src_stride[n];
        }
        for (int j = n; j > 0 && c->dst_stride[j - 1] < c->dst_stride[j]; j--) swap_axes(c, j - 1, j);
        n++;
    }
    for (int i = n - 2; i >= 0; i--) {
        if (c->src_stride[i] != c->src_stride[i + 1] * c->count[i + 1] ||
            c->dst_stride[i] != c->dst_stride[i + 1] * c->count[i + 1])
            continue;
        c->count[i] *= c->count[i + 1];
        c->src_stride[i] = c->src_stride[i + 1];
        c->dst_stride[i] = c->dst_stride[i + 1];
        for (int j = i + 1; j < n - 1; j++) swap_axes(c, j, j + 1);
        n--;
    }
    c->axes = (int16_t)n;
}

static void choose_kind(wb_copy *c) {
    int last = c->axes - 1;
    if (last > 5) return; /* never; but the compiler cannot know and warns */
    if (c->op != COPY) {
        c->kind = KIND_CAST;
        return;
    }
    if (last >= 0 && c->src_stride[last] == c->run && c->dst_stride[last] == c->run) {
        c->run *= c->count[last];
        c->axes--, last--;
    }
    c->kind = c->axes == 0 ? KIND_RUN : KIND_STRIDED;
    if (c->axes < 2 || c->dst_stride[last] != c->run) return;
    if (c->run != 1 && c->run != 2 && c->run != 4 && c->run != 8) return;
    for (int i = last - 1; i >= 0; i--) {
        if (c->src_stride[i] != c->run) continue;
        for (int j = i; j < last - 1; j++) swap_axes(c, j, j + 1);
        c->kind = KIND_TRANSPOSE;
        return;
    }
}

static int64_t copy_bytes(const wb_copy *c) {
    int64_t n = c->run;
    for (int i = 0; i < c->axes; i++) n *= c->count[i];
    return n;
}

/* Cut `c` into pieces of about PIECE_BYTES along its outermost axis; write them at `out` unless it is NULL. */
static int64_t cut(const wb_copy *c, wb_copy *out) {
    int64_t bytes = copy_bytes(c);
    if (bytes <= PIECE_BYTES) {
        if (out) *out = *c;
        return 1;
    }
    int whole = c->kind == KIND_RUN;
    int64_t length = whole ? c->run : c->count[0];
    int64_t step = whole ? PIECE_BYTES : PIECE_BYTES / (bytes / length);
    if (c->kind == KIND_TRANSPOSE) step = (step + 63) / 64 * 64;
    if (step < 1) step = 1;
    int64_t pieces = 0;
    for (int64_t at = 0; at < length; at += step, pieces++) {
        if (!out) continue;
        int64_t n = length - at < step ? length - at : step;
        wb_copy *p = out + pieces;
        *p = *c;
        p->src += whole ? at : at * c->src_stride[0];
        p->dst += whole ? at : at * c->dst_stride[0];
        if (whole)
            p->run = n;
        else
            p->count[0] = n;
    }
    return pieces;
}

/* Returns the number of pieces. With copies == NULL only counts them; batches needs room for one entry more than that. */
int64_t wb_prepare(const wb_row *rows, int64_t num_rows, const uint64_t *sources, const uint64_t *destinations,
                   wb_copy *copies, int64_t *batches, int64_t *num_batches, int64_t *total_bytes) {
    int64_t total = 0, pieces = 0, in_batch = 0, num = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        const wb_row *row = rows + r;
        wb_copy c = {0};
        int empty = 0;
        for (int i = 0; i < 6; i++) empty |= row->count[i] == 0;
        if (empty) continue;
        c.src = (const char *)(uintptr_t)(sources[row->src_buffer] + (uint64_t)row->src_offset);
        c.dst = (char *)(uintptr_t)(destinations[row->dst_buffer] + (uint64_t)row->dst_offset);
        memcpy(c.count, row->count, sizeof c.count);
        memcpy(c.src_stride, row->src_stride, sizeof c.src_stride);
        memcpy(c.dst_stride, row->dst_stride, sizeof c.dst_stride);
        c.run = row->itemsize;
        c.op = row->op;
        simplify_axes(&c);
        choose_kind(&c);
        total += copy_bytes(&c);
        int64_t n = cut(&c, copies ? copies + pieces : NULL);
        for (int64_t i = 0; copies && i < n; i++) {
            if (in_batch == 0) batches[num++] = pieces + i;
            in_batch += copy_bytes(copies + pieces + i) + ROW_COST_BYTES;
            if (in_batch >= BATCH_BYTES) in_batch = 0;
        }
        pieces += n;
    }
    if (copies) {
        batches[num] = pieces;
        *num_batches = num;
    }
    *total_bytes = total;
    return pieces;
}

/* --- contiguous runs ---------------------------------------------------------------------------------------------- */

/* Copy without reading the destination into the cache first: it pays when the bytes leave the cache before their use. */
static void copy_streaming(char *dst, const char *src, int64_t n) {
#if WB_SSE2
    int64_t head = (int64_t)(-(uintptr_t)dst & 63);
    memcpy(dst, src, (size_t)head);
    dst += head, src += head, n -= head;
    for (; n >= 64; n -= 64, src += 64, dst += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_stream_si128((__m128i *)dst, a);
        _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c);
        _mm_stream_si128((__m128i *)(dst + 48), d);
    }
#endif
    memcpy(dst, src, (size_t)n);
}

static void copy_run(char *dst, const char *src, int64_t n, int streaming) {
    if (streaming && n >= STREAM_RUN_BYTES)
        copy_streaming(dst, src, n);
    else
        memcpy(dst, src, (size_t)n);
}

static void streaming_fence(void) {
#if WB_SSE2
    _mm_sfence();
#endif
}

/* --- small elements ----------------------------------------------------------------------------------------------- */

/* Every second element is what rotary layouts take; as a constant the compiler makes shuffles of it. */
#define COPY_LINE(type)                                                                                               \
    if (ds == sizeof(type) && ss == 2 * sizeof(type))                                                                 \
        for (int64_t i = 0; i < n; i++) ((type *)dst)[i] = ((const type *)src)[2 * i];                                \
    else                                                                                                              \
        for (int64_t i = 0; i < n; i++, dst += ds, src += ss) *(type *)dst = *(const type *)src

static void copy_line(char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, int64_t run, int streaming) {
    switch (run) {
    case 1: COPY_LINE(uint8_t); break;
    case 2: COPY_LINE(u16); break;
    case 4: COPY_LINE(u32); break;
    case 8: COPY_LINE(u64); break;
    default:
        for (int64_t i = 0; i < n; i++, dst += ds, src += ss) copy_run(dst, src, run, streaming);
    }
}

#if WB_SSE2
static void tile_16(char *dst, int64_t ds, const char *src, int64_t ss) {
    __m128i r[8], t[8];
    for (int k = 0; k < 8; k++) r[k] = _mm_loadu_si128((const __m128i *)(src + k * ss));
    for (int k = 0; k < 4; k++) {
        t[2 * k] = _mm_unpacklo_epi16(r[2 * k], r[2 * k + 1]);
        t[2 * k + 1] = _mm_unpackhi_epi16(r[2 * k], r[2 * k + 1]);
    }
    for (int k = 0; k < 2; k++) {
        r[4 * k] = _mm_unpacklo_epi32(t[4 * k], t[4 * k + 2]);
        r[4 * k + 1] = _mm_unpackhi_epi32(t[4 * k], t[4 * k + 2]);
        r[4 * k + 2] = _mm_unpacklo_epi32(t[4 * k + 1], t[4 * k + 3]);
        r[4 * k + 3] = _mm_unpackhi_epi32(t[4 * k + 1], t[4 * k + 3]);
    }
    for (int k = 0; k < 4; k++) {
        _mm_storeu_si128((__m128i *)(dst + 2 * k * ds), _mm_unpacklo_epi64(r[k], r[k + 4]));
        _mm_storeu_si128((__m128i *)(dst + (2 * k + 1) * ds), _mm_unpackhi_epi64(r[k], r[k + 4]));
    }
}

static void tile_32(char *dst, int64_t ds, const char *src, int64_t ss) {
    __m128i r[4], t[4];
    for (int k = 0; k < 4; k++) r[k] = _mm_loadu_si128((const __m128i *)(src + k * ss));
    t[0] = _mm_unpacklo_epi32(r[0], r[1]), t[1] = _mm_unpackhi_epi32(r[0], r[1]);
    t[2] = _mm_unpacklo_epi32(r[2], r[3]), t[3] = _mm_unpackhi_epi32(r[2], r[3]);
    _mm_storeu_si128((__m128i *)dst, _mm_unpacklo_epi64(t[0], t[2]));
    _mm_storeu_si128((__m128i *)(dst + ds), _mm_unpackhi_epi64(t[0], t[2]));
    _mm_storeu_si128((__m128i *)(dst + 2 * ds), _mm_unpacklo_epi64(t[1], t[3]));
    _mm_storeu_si128((__m128i *)(dst + 3 * ds), _mm_unpackhi_epi64(t[1], t[3]));
}
#endif

/* Source is contiguous along b, destination along a. A block reads whole cache lines of the source and keeps them in
 * the nearest caches until each is used up. */
static void transpose(char *dst, int64_t ds_b, const char *src, int64_t ss_a, int64_t na, int64_t nb, int64_t size) {
    const int64_t block_a = 512, block_b = 64 / size;
    int64_t tile = 0;
#if WB_SSE2
    tile = size == 2 ? 8 : size == 4 ? 4 : 0;
#endif
    if (na < 8 && na < nb) { /* a few long lines: interleaving */
        for (int64_t a = 0; a < na; a++) copy_line(dst + a * size, ds_b, src + a * ss_a, size, nb, size, 0);
        return;
    }
    for (int64_t b0 = 0; b0 < nb; b0 += block_b)
        for (int64_t a0 = 0; a0 < na; a0 += block_a) {
            int64_t b1 = b0 + block_b < nb ? b0 + block_b : nb, a1 = a0 + block_a < na ? a0 + block_a : na;
            int64_t a_tiled = tile ? a0 + (a1 - a0) / tile * tile : a0, b_tiled = tile ? b0 + (b1 - b0) / tile * tile : b0;
            if (a_tiled == a0) b_tiled = b0;
#if WB_SSE2
            for (int64_t b = b0; b < b_tiled; b += tile)
                for (int64_t a = a0; a < a_tiled; a += tile) {
                    if (size == 2)
                        tile_16(dst + b * ds_b + a * size, ds_b, src + a * ss_a + b * size, ss_a);
                    else
                        tile_32(dst + b * ds_b + a * size, ds_b, src + a * ss_a + b * size, ss_a);
                }
#endif
            for (int64_t b = b0; b < b1; b++) {
                int64_t a = b < b_tiled ? a_tiled : a0;
                copy_line(dst + b * ds_b + a * size, size, src + a * ss_a + b * size, ss_a, a1 - a, size, 0);
            }
        }
}

/* --- casts -------------------------------------------------------------------------------------------------------- */

static inline uint16_t f32_to_bf16(uint32_t x) {
    uint32_t rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16, quiet = (x >> 16) | 0x40;
    return (uint16_t)((x & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
}

static inline uint32_t bf16_to_f32(uint16_t x) { return (uint32_t)x << 16; }

static inline uint16_t f32_to_f16(uint32_t x) {
    uint32_t sign = (x >> 16) & 0x8000, a = x & 0x7FFFFFFF;
    if (a > 0x7F800000) return (uint16_t)(sign | 0x7E00 | ((a >> 13) & 0x1FF));
    if (a >= 0x477FF000) return (uint16_t)(sign | 0x7C00);           /* 65520 and up round to infinity */
    if (a >= 0x38800000) return (uint16_t)(sign | ((a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13));
    if (a < 0x33000000) return (uint16_t)sign;                        /* below 2^-25, half the smallest subnormal */
    uint32_t shift = 126 - (a >> 23), m = (a & 0x7FFFFF) | 0x800000, q = m >> shift;
    uint32_t rest = m & (((uint32_t)1 << shift) - 1), half = (uint32_t)1 << (shift - 1);
    return (uint16_t)(sign | (q + (rest > half || (rest == half && (q & 1)))));
}

static inline uint32_t f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, e = (x >> 10) & 31, m = x & 0x3FF;
    if (e == 31) return sign | 0x7F800000 | (m ? 0x400000 | (m << 13) : 0);
    if (e) return sign | ((e + 112) << 23) | (m << 13);
    if (!m) return sign;
    for (e = 113; !(m & 0x400); e--) m <<= 1;
    return sign | (e << 23) | ((m & 0x3FF) << 13);
}

static inline uint16_t bf16_to_f16(uint16_t x) { return f32_to_f16(bf16_to_f32(x)); }
static inline uint16_t f16_to_bf16(uint16_t x) { return f32_to_bf16(f16_to_f32(x)); }

static inline uint32_t f64_to_f32(uint64_t x) {
    union { uint64_t bits; double value; } wide = {x};
    union { uint32_t bits; float value; } narrow;
    if ((x & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000)
        return (uint32_t)((x >> 32 & 0x80000000) | 0x7FC00000 | (x >> 29 & 0x3FFFFF));
    narrow.value = (float)wide.value; /* to nearest, ties to even, unless somebody changed the mode of the thread */
    return narrow.bits;
}

static inline uint64_t f32_to_f64(uint32_t x) {
    union { uint32_t bits; float value; } narrow = {x};
    union { uint64_t bits; double value; } wide;
    if ((x & 0x7FFFFFFF) > 0x7F800000)
        return (uint64_t)(x & 0x80000000) << 32 | 0x7FF8000000000000 | (uint64_t)(x & 0x3FFFFF) << 29;
    wide.value = narrow.value;
    return wide.bits;
}

static inline uint16_t f64_to_bf16(uint64_t x) { return f32_to_bf16(f64_to_f32(x)); }
static inline uint64_t bf16_to_f64(uint16_t x) { return f32_to_f64(bf16_to_f32(x)); }
static inline uint16_t f64_to_f16(uint64_t x) { return f32_to_f16(f64_to_f32(x)); }
static inline uint64_t f16_to_f64(uint16_t x) { return f32_to_f64(f16_to_f32(x)); }

#define CAST_LINE(to, from, function)                                                                                 \
    for (int64_t i = 0; i < n; i++) *(to *)(dst + i * ds) = function(*(const from *)(src + i * ss))
#define CASTS                                                                                                         \
    switch (op) {                                                                                                     \
    case F32_TO_BF16: CAST_LINE(u16, u32, f32_to_bf16); break;                                                        \
    case BF16_TO_F32: CAST_LINE(u32, u16, bf16_to_f32); break;                                                        \
    case F32_TO_F16: CAST_LINE(u16, u32, f32_to_f16); break;                                                          \
    case F16_TO_F32: CAST_LINE(u32, u16, f16_to_f32); break;                                                          \
    case BF16_TO_F16: CAST_LINE(u16, u16, bf16_to_f16); break;                                                        \
    case F64_TO_F32: CAST_LINE(u32, u64, f64_to_f32); break;                                                          \
    case F32_TO_F64: CAST_LINE(u64, u32, f32_to_f64); break;                                                          \
    case F64_TO_BF16: CAST_LINE(u16, u64, f64_to_bf16); break;                                                        \
    case BF16_TO_F64: CAST_LINE(u64, u16, bf16_to_f64); break;                                                        \
    case F64_TO_F16: CAST_LINE(u16, u64, f64_to_f16); break;                                                          \
    case F16_TO_F64: CAST_LINE(u64, u16, f16_to_f64); break;                                                          \
    default: CAST_LINE(u16, u16, f16_to_bf16);                                                                        \
    }

static int64_t size_after(int op, int64_t size) {
    switch (op) {
    case COPY: return size;
    case BF16_TO_F32: case F16_TO_F32: case F64_TO_F32: return 4;
    case F32_TO_F64: case BF16_TO_F64: case F16_TO_F64: return 8;
    default: return 2;
    }
}

static void cast_strided(int op, char *dst, int64_t ds, const char *src, int64_t ss, int64_t n) { CASTS }

static void cast_contiguous(int op, char *dst, const char *src, int64_t n, int64_t ss) {
    const int64_t ds = size_after(op, 0);
    if (op == F32_TO_BF16)
        for (int64_t i = 0; i < n; i++) ((u16 *)dst)[i] = f32_to_bf16(((const u32 *)src)[i]);
    else if (op == BF16_TO_F32)
        for (int64_t i = 0; i < n; i++) ((u32 *)dst)[i] = bf16_to_f32(((const u16 *)src)[i]);
    else
        CASTS
}

#if WB_F16C
WB_AVX2 static inline __m256i round_to_bf16(__m256i x) {
    const __m256i infinity = _mm256_set1_epi32(0x7F800000), bias = _mm256_set1_epi32(0x7FFF);
    __m256i upper = _mm256_srli_epi32(x, 16), odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(bias, odd)), 16);
    __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7FFFFFFF)), infinity);
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, _mm256_set1_epi32(0x40)), nan);
}

WB_AVX2 static void cast_avx2(int op, char *dst, const char *src, int64_t n) {
    int64_t i = 0;
    if (op == F32_TO_BF16) {
        for (; i + 16 <= n; i += 16) {
            __m256i low = round_to_bf16(_mm256_loadu_si256((const __m256i *)(src + 4 * i)));
            __m256i high = round_to_bf16(_mm256_loadu_si256((const __m256i *)(src + 4 * i + 32)));
            __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
            _mm256_storeu_si256((__m256i *)(dst + 2 * i), packed);
        }
    } else if (op == BF16_TO_F32) {
        for (; i < n; i++) ((u32 *)dst)[i] = bf16_to_f32(((const u16 *)src)[i]);
    } else if (op == F32_TO_F16) {
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(dst + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps((const float *)(src + 4 * i)), 0));
    } else if (op == F16_TO_F32) {
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps((float *)(dst + 4 * i), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * i))));
    } else if (op == BF16_TO_F16) {
        for (; i + 8 <= n; i += 8) {
            __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(src + 2 * i))), 16);
            _mm_storeu_si128((__m128i *)(dst + 2 * i), _mm256_cvtps_ph(_mm256_castsi256_ps(wide), 0));
        }
    } else {
        for (; i + 8 <= n; i += 8) {
            __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * i)));
            __m256i round = round_to_bf16(_mm256_castps_si256(wide));
            __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(round, round), 0xD8);
            _mm_storeu_si128((__m128i *)(dst + 2 * i), _mm256_castsi256_si128(packed));
        }
    }
    if (i < n) {
        int64_t ss = op == F32_TO_BF16 || op == F32_TO_F16 ? 4 : 2, ds = size_after(op, 0);
        cast_strided(op, dst + i * ds, ds, src + i * ss, ss, n - i);
    }
}

static int has_avx2(void) {
    static int known = -1; /* a race only repeats the question */
    if (known < 0) known = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return known;
}
#endif

static void cast_line(int op, char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, int64_t size) {
    if (ss != size || ds != size_after(op, size)) {
        cast_strided(op, dst, ds, src, ss, n);
        return;
    }
#if WB_F16C
    if (op < F64_TO_F32 && has_avx2()) {
        cast_avx2(op, dst, src, n);
        return;
    }
#endif
    cast_contiguous(op, dst, src, n, size);
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

static void run_inner(const wb_copy *c, int inner, char *dst, const char *src, int streaming) {
    int last = c->axes - 1;
    if (c->kind == KIND_TRANSPOSE)
        transpose(dst, c->dst_stride[last - 1], src, c->src_stride[last], c->count[last], c->count[last - 1], c->run);
    else if (c->kind == KIND_CAST)
        cast_line(c->op, dst, inner ? c->dst_stride[last] : size_after(c->op, c->run), src,
                  inner ? c->src_stride[last] : c->run, inner ? c->count[last] : 1, c->run);
    else
        copy_line(dst, c->dst_stride[last], src, c->src_stride[last], c->count[last], c->run, streaming);
}

static void run_copy(const wb_copy *c, int streaming) {
    if (c->kind == KIND_RUN) {
        copy_run(c->dst, c->src, c->run, streaming);
        return;
    }
    int inner = c->kind == KIND_TRANSPOSE ? 2 : c->axes > 0, outer = c->axes - inner;
    int64_t index[6] = {0};
    char *dst = c->dst;
    const char *src = c->src;
    for (;;) {
        run_inner(c, inner, dst, src, streaming);
        int i = outer - 1;
        for (; i >= 0; i--) {
            dst += c->dst_stride[i], src += c->src_stride[i];
            if (++index[i] < c->count[i]) break;
            dst -= c->dst_stride[i] * c->count[i], src -= c->src_stride[i] * c->count[i];
            index[i] = 0;
        }
        if (i < 0) return;
    }
}

typedef struct {
    const wb_copy *copies;
    const int64_t *batches;
    int64_t num_batches, next;
    int streaming;
} job;

static void *draw_batches(void *argument) {
    job *j = argument;
    for (;;) {
        int64_t b = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (b >= j->num_batches) break;
        for (int64_t i = j->batches[b]; i < j->batches[b + 1]; i++) run_copy(j->copies + i, j->streaming);
    }
    streaming_fence();
    return NULL;
}

/* Threads live for one launch: a table is worth it from some MiB on, where starting one costs under 2 %. */
void wb_launch(const wb_copy *copies, const int64_t *batches, int64_t num_batches, int streaming, int num_threads) {
    enum { MAX_THREADS = 16 };
    job j = {copies, batches, num_batches, 0, streaming};
    pthread_t threads[MAX_THREADS];
    int started = 0;
    while (started + 1 < num_threads && started < MAX_THREADS && started + 1 < num_batches)
        if (pthread_create(&threads[started], NULL, draw_batches, &j) == 0)
            started++;
        else
            break; /* no more threads to be had: this one does the work */
    draw_batches(&j);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* writes: num_writes triples (source offset, destination offset, bytes), checked by the caller. */
void wb_copy_writes(const char *source, char *destination, const int64_t *writes, int64_t num_writes) {
    int64_t total = 0;
    for (int64_t i = 0; i < num_writes; i++) total += writes[3 * i + 2];
    for (int64_t i = 0; i < num_writes; i++)
        copy_run(destination + writes[3 * i + 1], source + writes[3 * i], writes[3 * i + 2], total >= STREAM_WRITES_BYTES);
    streaming_fence();
}
