/* Casts, bit for bit as reference.py makes them. Rounding is to nearest, ties to even. */
#define CAST_STAGE_BYTES 2048
#define CAST_AHEAD_BYTES (16 << 10) /* of longer lines the hardware finds the next bytes itself */

enum {
    COPY, F32_TO_BF16, BF16_TO_F32, F32_TO_F16, F16_TO_F32, BF16_TO_F16, F16_TO_BF16,
    F64_TO_F32, F32_TO_F64, F64_TO_BF16, BF16_TO_F64, F64_TO_F16, F16_TO_F64
};

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

#ifdef WB_AVX2
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
#endif

/* dst is contiguous. */
static void cast_to_run(int op, char *dst, const char *src, int64_t ss, int64_t n, int64_t size) {
    const int64_t ds = size_after(op, size);
    if (ss != size) {
        cast_strided(op, dst, ds, src, ss, n);
        return;
    }
#ifdef WB_AVX2
    if (op < F64_TO_F32 && vector_bytes() >= 32) {
        cast_avx2(op, dst, src, n);
        return;
    }
#endif
    cast_contiguous(op, dst, src, n, size);
}

/* Ask for the bytes that will be read after these; `next` need not be mapped. */
static void prefetch(const char *next, int64_t nbytes) {
#if WB_SSE2
    for (int64_t i = 0; i < nbytes; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
#else
    (void)next, (void)nbytes;
#endif
}

/* Through a stage in the nearest cache, which then leaves in whole lines: the destination is not read from memory. Short lines
 * ask for the line at `next` meanwhile. */
static void cast_streaming(int op, char *dst, const char *src, int64_t ss, int64_t n, int64_t size, const char *next) {
    char stage[CAST_STAGE_BYTES] __attribute__((aligned(64)));
    const int64_t ds = size_after(op, size);
    int64_t most = (CAST_STAGE_BYTES - (int64_t)((uintptr_t)dst & 63)) / ds; /* the first part ends where a line ends */
    for (int64_t i = 0; i < n; i += most, most = CAST_STAGE_BYTES / ds) {
        if (most > n - i) most = n - i;
        if (n * size <= CAST_AHEAD_BYTES && ss == size) prefetch(next + i * size, most * size);
        cast_to_run(op, stage, src + i * ss, ss, most, size);
        copy_streaming(dst + i * ds, stage, most * ds, stage, 0);
    }
}

static void cast_line(int op, char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, int64_t size, int streaming,
                      const char *next) {
    if (ds != size_after(op, size))
        cast_strided(op, dst, ds, src, ss, n);
    else if (streaming && n * ds >= STREAM_RUN_BYTES)
        cast_streaming(op, dst, src, ss, n, size, next);
    else
        cast_to_run(op, dst, src, ss, n, size);
}
