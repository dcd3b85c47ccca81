/* The digest of bytes that travel: the native form of digest_in_numpy in digests.py, which is the specification.
 *
 * Eight lanes take a word each from every stripe of 64 bytes. Two multiplications a word keep two or more multipliers busy
 * and no vector instructions are needed: this is about as fast as memory is read, on any 64-bit processor.
 */
#define DIGEST_STRIPE 64
#define DIGEST_BLOCK_STRIPES 64
#define DIGEST_LANES 8
#define DIGEST_A 0x9E3779B97F4A7C15ull
#define DIGEST_B 0xBF58476D1CE4E5B9ull
#define DIGEST_C 0x94D049BB133111EBull

/* carry: the begun stripe. in_block: stripes of the begun block. lane is only meaningful within a block. */
typedef struct {
    uint64_t lane[DIGEST_LANES], chain;
    int64_t in_block, carried, nbytes;
    char carry[DIGEST_STRIPE];
} digest_state;

WB_INLINE uint64_t rotate_left(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

WB_INLINE uint64_t digest_fold(uint64_t chain, uint64_t value) {
    return rotate_left(chain ^ value, 27) * DIGEST_A + DIGEST_B;
}

static void digest_end_block(digest_state *s) {
    uint64_t block = DIGEST_C;
    for (int i = 0; i < DIGEST_LANES; i++) block = digest_fold(block, s->lane[i]);
    s->chain = digest_fold(s->chain, block);
    s->in_block = 0;
}

static void digest_stripes(digest_state *s, const char *at, int64_t num) {
    while (num > 0) {
        int64_t n = DIGEST_BLOCK_STRIPES - s->in_block < num ? DIGEST_BLOCK_STRIPES - s->in_block : num;
        uint64_t lane[DIGEST_LANES];
        for (int i = 0; i < DIGEST_LANES; i++) lane[i] = s->in_block ? s->lane[i] : DIGEST_A * (uint64_t)(i + 1);
        for (const char *end = at + n * DIGEST_STRIPE; at < end; at += DIGEST_STRIPE)
            for (int i = 0; i < DIGEST_LANES; i++)
                lane[i] = rotate_left(lane[i] + *(const u64 *)(at + 8 * i) * DIGEST_B, 31) * DIGEST_C;
        memcpy(s->lane, lane, sizeof lane);
        s->in_block += n, num -= n;
        if (s->in_block == DIGEST_BLOCK_STRIPES) digest_end_block(s);
    }
}

static void digest_bytes(digest_state *s, const char *at, int64_t n) {
    s->nbytes += n;
    if (s->carried) {
        int64_t m = DIGEST_STRIPE - s->carried < n ? DIGEST_STRIPE - s->carried : n;
        memcpy(s->carry + s->carried, at, (size_t)m);
        s->carried += m, at += m, n -= m;
        if (s->carried < DIGEST_STRIPE) return;
        digest_stripes(s, s->carry, 1);
    }
    digest_stripes(s, at, n / DIGEST_STRIPE);
    s->carried = n % DIGEST_STRIPE;
    memcpy(s->carry, at + (n - s->carried), (size_t)s->carried);
}

/* segments: num_segments pairs of int64 (offset, bytes), checked by the caller; row_step and column_step in bytes. */
uint64_t wb_digest(const char *memory, const char *segments, int64_t num_segments, int64_t row_step, int64_t column_step) {
    digest_state s = {.chain = DIGEST_C};
    for (int64_t i = 0; i < num_segments; i++, segments += row_step)
        digest_bytes(&s, memory + *(const int64_t *)segments, *(const int64_t *)(segments + column_step));
    if (s.carried) {
        memset(s.carry + s.carried, 0, (size_t)(DIGEST_STRIPE - s.carried));
        digest_stripes(&s, s.carry, 1);
    }
    if (s.in_block) digest_end_block(&s);
    uint64_t h = digest_fold(s.chain, (uint64_t)s.nbytes);
    h = (h ^ h >> 32) * DIGEST_B;
    return h ^ h >> 29;
}
