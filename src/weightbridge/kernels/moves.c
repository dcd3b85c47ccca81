/* Contiguous runs and lines of small elements: what the other C files here build on. */
#include <pthread.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#define WB_SSE2 1
#endif
#if defined(WB_SSE2) && defined(__GNUC__)
#define WB_AVX2 __attribute__((target("avx2,f16c")))
#define WB_AVX512 __attribute__((target("avx512f")))
#endif
#define WB_INLINE static inline __attribute__((always_inline))
#define WB_NOINLINE __attribute__((noinline))

#define STREAM_RUN_BYTES 512
#define STREAM_WRITES_BYTES (4 << 20)
#define PREFETCH_BYTES 8192 /* how far ahead the source of the next runs is asked for */
#define SHORT_RUN_BYTES 2048 /* from here on the hardware's reading ahead pays for what it overshoots */
#define GAP_BYTES 256        /* up to here what lies between two runs may as well be read */

/* Live tensors and slots give no alignment promise, and x86 and arm64 need none. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

/* --- contiguous runs ---------------------------------------------------------------------------------------------- */

/* n is a multiple of 64 and dst aligned to it. `next` is what will be read after this run: the hardware sees a stream only
 * some lines into it, so lines there are asked for meanwhile. A wrong or unmapped `next` costs time and nothing else. */
typedef void stream_lines(char *dst, const char *src, int64_t n, const char *next);

#define STREAM_ASKING(STREAM_LINE, at)                                                                                \
    do {                                                                                                              \
        _mm_prefetch(next + (at), _MM_HINT_NTA);                                                                      \
        STREAM_LINE(dst + (at), src + (at));                                                                          \
    } while (0)
#define STREAM_IN_ORDER(name, attribute, STREAM_LINE)                                                                 \
    attribute static void name(char *dst, const char *src, int64_t n, const char *next) {                             \
        int64_t i = 0, quiet = n - PREFETCH_BYTES;                                                                    \
        for (; i < quiet; i += 64) STREAM_LINE(dst + i, src + i);                                                     \
        for (next -= i; i < n; i += 64) STREAM_ASKING(STREAM_LINE, i);                                                \
    }

/* The same for short runs that lie apart. The hardware would read on beyond the end of each, half as much again, for nobody. So
 * no line is read after the one before it in memory, and each of a block by an instruction of its own: no stream is seen. */
#define STREAM_BLOCK(STREAM_LINE, lines, step, unroll)                                                                \
    do {                                                                                                              \
        _Pragma(unroll) for (int k = 0; k < lines; k++) STREAM_ASKING(STREAM_LINE, 64 * (step * k % lines));          \
        dst += 64 * lines, src += 64 * lines, next += 64 * lines, n -= 64 * lines;                                    \
    } while (0)
#define STREAM_OUT_OF_ORDER(name, attribute, STREAM_LINE)                                                             \
    attribute static void name(char *dst, const char *src, int64_t n, const char *next) {                             \
        while (n >= 64 * 16) STREAM_BLOCK(STREAM_LINE, 16, 7, "GCC unroll 16");                                       \
        if (n >= 64 * 8) STREAM_BLOCK(STREAM_LINE, 8, 3, "GCC unroll 8");                                             \
        if (n >= 64 * 4) STREAM_BLOCK(STREAM_LINE, 4, 3, "GCC unroll 4");                                             \
        for (int64_t i = 0; i < n; i += 64) STREAM_ASKING(STREAM_LINE, i);                                            \
    }
#define STREAM_PAIR(suffix, attribute, STREAM_LINE)                                                                   \
    STREAM_IN_ORDER(in_order_##suffix, attribute, STREAM_LINE)                                                        \
    STREAM_OUT_OF_ORDER(out_of_order_##suffix, attribute, STREAM_LINE)

#if WB_SSE2
#define STREAM_LINE_SSE2(dst, src)                                                                                    \
    for (int b = 0; b < 64; b += 16)                                                                                  \
    _mm_stream_si128((__m128i *)((dst) + b), _mm_loadu_si128((const __m128i *)((src) + b)))
STREAM_PAIR(sse2, , STREAM_LINE_SSE2)
#endif
#ifdef WB_AVX2
#define STREAM_LINE_AVX2(dst, src)                                                                                    \
    do {                                                                                                              \
        __m256i low = _mm256_loadu_si256((const __m256i *)(src)), high = _mm256_loadu_si256((const __m256i *)((src) + 32)); \
        _mm256_stream_si256((__m256i *)(dst), low);                                                                   \
        _mm256_stream_si256((__m256i *)((dst) + 32), high);                                                           \
    } while (0)
#define STREAM_LINE_AVX512(dst, src) _mm512_stream_si512((__m512i *)(dst), _mm512_loadu_si512(src))
STREAM_PAIR(avx2, WB_AVX2, STREAM_LINE_AVX2)
STREAM_PAIR(avx512, WB_AVX512, STREAM_LINE_AVX512)
#endif

static int most_vector_bytes = 64;

/* No launch may be under way. */
void wb_limit_vectors(int bytes) { most_vector_bytes = bytes; }

#if WB_SSE2
static stream_lines *stream_in_order = in_order_sse2, *stream_out_of_order = out_of_order_sse2;

/* The widest vectors this processor has and wb_limit_vectors allows: 64, 32 or 16 bytes. */
static int vector_bytes(void) {
    static int known; /* a race only repeats the question */
#ifdef WB_AVX2
    if (!known) {
        const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        known = !avx2 ? 16 : __builtin_cpu_supports("avx512f") ? 64 : 32;
    }
#else
    known = 16;
#endif
    return known < most_vector_bytes ? known : most_vector_bytes;
}
#endif

/* Called before anything streams: take the widest stores there are. With those of 64 bytes a line leaves in one. Threads that
 * come here at the same time choose the same. */
static void choose_stores(void) {
#ifdef WB_AVX2
    const int bytes = vector_bytes();
    stream_in_order = bytes == 64 ? in_order_avx512 : bytes == 32 ? in_order_avx2 : in_order_sse2;
    stream_out_of_order = bytes == 64 ? out_of_order_avx512 : bytes == 32 ? out_of_order_avx2 : out_of_order_sse2;
#endif
}

/* Copy without reading the destination into the cache first: it pays when the bytes leave the cache before their use. `apart`:
 * see lies_apart. Inlined, its memcpy of a few bytes would become something slower than a call. */
WB_NOINLINE static void copy_streaming(char *dst, const char *src, int64_t n, const char *next, int apart) {
#if WB_SSE2
    int64_t head = (int64_t)(-(uintptr_t)dst & 63);
    if (head) {
        if (head > n) head = n;
        memcpy(dst, src, (size_t)head);
        dst += head, src += head, n -= head;
    }
    int64_t lines = n & ~(int64_t)63;
    (apart ? stream_out_of_order : stream_in_order)(dst, src, lines, next);
    dst += lines, src += lines, n -= lines;
    if (!n) return;
#endif
    memcpy(dst, src, (size_t)n);
}

/* Whole cache lines always stream well; of other runs the ends go through the cache, which short ones do not repay. */
WB_INLINE int streams(const char *dst, int64_t n) { return n >= STREAM_RUN_BYTES || (n > 0 && !(((uintptr_t)dst | (uint64_t)n) & 63)); }

WB_INLINE void copy_run(char *dst, const char *src, int64_t n, int streaming, const char *next, int apart) {
    if (streaming && streams(dst, n))
        copy_streaming(dst, src, n, next, apart);
    else
        memcpy(dst, src, (size_t)n);
}

/* How many runs of n bytes ahead lies what should be asked for now. */
WB_INLINE int64_t runs_ahead(int64_t n) { return n >= PREFETCH_BYTES ? 1 : PREFETCH_BYTES / n; }

/* Whether a run is short, but not too short for blocks of lines, and the following one begins elsewhere. */
WB_INLINE int lies_apart(const char *src, int64_t n, const char *following) {
    return n >= 256 && n < SHORT_RUN_BYTES && (uintptr_t)following - (uintptr_t)(src + n) > GAP_BYTES;
}

/* Runs apart mostly lie on pages of their own: one line is asked for well before the others, which find the page known then. */
WB_INLINE void ask_for_page(const char *run, int64_t n) {
#if WB_SSE2
    if (n >= STREAM_RUN_BYTES) _mm_prefetch(run, _MM_HINT_T1);
#else
    (void)run, (void)n;
#endif
}

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
    const uintptr_t ahead = (uintptr_t)(runs_ahead(run) * ss); /* unsigned: it may lead out of the source */
    const int apart = streaming && lies_apart(src, run, (const char *)((uintptr_t)src + (uintptr_t)ss));
    for (int64_t i = 0; i < n; i++, dst += ds, src += ss) {
        const uintptr_t next = (uintptr_t)src + ahead;
        if (apart) ask_for_page((const char *)(next + ahead), run);
        copy_run(dst, src, run, streaming, (const char *)next, apart);
    }
}
