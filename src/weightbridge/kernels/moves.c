/* Contiguous runs and lines of small elements: what the other C files here build on. */
#include <pthread.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#define WB_SSE2 1
#endif
#if defined(WB_SSE2) && defined(__GNUC__)
#define WB_AVX2 __attribute__((target("avx2,f16c")))
#endif
#define WB_INLINE static inline __attribute__((always_inline))

#define STREAM_RUN_BYTES 512
#define STREAM_WRITES_BYTES (4 << 20)
#define PREFETCH_BYTES 16384 /* how far ahead the source of the next runs is asked for */

/* Live tensors and slots give no alignment promise, and x86 and arm64 need none. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

/* --- contiguous runs ---------------------------------------------------------------------------------------------- */

/* n is a multiple of 64 and dst aligned to it. `next` is what will be read after this run: the hardware sees a stream only
 * some lines into it. A wrong or unmapped `next` costs time and nothing else. */
#if WB_SSE2
static void stream_lines_sse2(char *dst, const char *src, int64_t n, const char *next) {
    for (int64_t i = 0; i < n; i += 64) {
        if (n - i <= PREFETCH_BYTES) _mm_prefetch(next + PREFETCH_BYTES - (n - i), _MM_HINT_NTA);
        for (int k = 0; k < 64; k += 16)
            _mm_stream_si128((__m128i *)(dst + i + k), _mm_loadu_si128((const __m128i *)(src + i + k)));
    }
}
#endif
#ifdef WB_AVX2
WB_AVX2 static void stream_lines_avx2(char *dst, const char *src, int64_t n, const char *next) {
    int64_t i = 0, quiet = n - PREFETCH_BYTES;
    for (; i < quiet; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i)), b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
    for (const char *ahead = next - i; i < n; i += 64) {
        _mm_prefetch(ahead + i, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i)), b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
    }
}

static int has_avx2(void) {
    static int known = -1; /* a race only repeats the question */
    if (known < 0) known = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    return known;
}
#endif

/* Copy without reading the destination into the cache first: it pays when the bytes leave the cache before their use. */
static void copy_streaming(char *dst, const char *src, int64_t n, const char *next) {
#if WB_SSE2
    int64_t head = (int64_t)(-(uintptr_t)dst & 63);
    if (head) {
        if (head > n) head = n;
        memcpy(dst, src, (size_t)head);
        dst += head, src += head, n -= head;
    }
    int64_t lines = n & ~(int64_t)63;
#ifdef WB_AVX2
    if (has_avx2())
        stream_lines_avx2(dst, src, lines, next);
    else
#endif
        stream_lines_sse2(dst, src, lines, next);
    dst += lines, src += lines, n -= lines;
    if (!n) return;
#endif
    memcpy(dst, src, (size_t)n);
}

/* Whole cache lines always stream well; of other runs the ends go through the cache, which short ones do not repay. */
WB_INLINE int streams(const char *dst, int64_t n) { return n >= STREAM_RUN_BYTES || (n > 0 && !(((uintptr_t)dst | (uint64_t)n) & 63)); }

WB_INLINE void copy_run(char *dst, const char *src, int64_t n, int streaming, const char *next) {
    if (streaming && streams(dst, n))
        copy_streaming(dst, src, n, next);
    else
        memcpy(dst, src, (size_t)n);
}

/* How many runs of n bytes ahead lies what should be asked for now. */
WB_INLINE int64_t runs_ahead(int64_t n) { return n >= PREFETCH_BYTES ? 1 : PREFETCH_BYTES / n; }

static void streaming_fence(void) {
#if WB_SSE2
    _mm_sfence();
#endif
}

/* --- lines of small elements -------------------------------------------------------------------------------------- */

/* Every second element is what rotary layouts take; as a constant the compiler makes shuffles of it. */
#define COPY_LINE(type)                                                                                               \
    if (ds == sizeof(type) && ss == 2 * sizeof(type))                                                                 \
        for (int64_t i = 0; i < n; i++) ((type *)dst)[i] = ((const type *)src)[2 * i];                                \
    else                                                                                                              \
        for (int64_t i = 0; i < n; i++, dst += ds, src += ss) *(type *)dst = *(const type *)src

static void copy_line(char *dst, int64_t ds, const char *src, int64_t ss, int64_t n, int64_t run, int streaming) {
    switch (run) {
    case 1: COPY_LINE(uint8_t); return;
    case 2: COPY_LINE(u16); return;
    case 4: COPY_LINE(u32); return;
    case 8: COPY_LINE(u64); return;
    default: break;
    }
    const int64_t ahead = runs_ahead(run) * ss;
    for (int64_t i = 0; i < n; i++, dst += ds, src += ss)
        copy_run(dst, src, run, streaming, (const char *)((uintptr_t)src + (uintptr_t)ahead));
}
