/* Strided copies and casts over a descriptor table: the native form of reference.py, which is the specification.
 *
 * wb_prepare turns each row into records: absolute addresses, axes sorted by destination stride and merged, contiguous inner
 * axes folded into one run, large rows cut into pieces. What is one run becomes a `wb_run`, which is small; anything else a
 * `wb_copy`. Pieces are gathered into batches of about 1 MiB. wb_launch lets one or more threads draw batches from a counter.
 * It allocates nothing.
 */
#define PIECE_BYTES (2 << 20)
#define BATCH_BYTES (1 << 20)
#define ROW_COST_BYTES 64 /* what one row costs beside its bytes, in bytes of copying */

enum { KIND_RUN, KIND_STRIDED, KIND_TRANSPOSE, KIND_CAST };

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

/* The axis to cut along: the outermost one that is long enough, else the longest. */
static int axis_to_cut(const wb_copy *c, int64_t pieces) {
    int longest = 0;
    for (int i = 0; i < c->axes; i++) {
        if (c->count[i] >= 8 * pieces) return i;
        if (c->count[i] > c->count[longest]) longest = i;
    }
    return longest;
}

/* Cut `c` into pieces of about PIECE_BYTES; write them at `out` unless it is NULL. */
static int64_t cut(const wb_copy *c, wb_copy *out) {
    int64_t bytes = copy_bytes(c);
    if (bytes <= PIECE_BYTES) {
        if (out) *out = *c;
        return 1;
    }
    int axis = axis_to_cut(c, bytes / PIECE_BYTES);
    int64_t step = PIECE_BYTES / (bytes / c->count[axis]), pieces = 0;
    if (c->kind == KIND_TRANSPOSE && axis >= c->axes - 2) step = (step + 63) / 64 * 64;
    if (step < 1) step = 1;
    for (int64_t at = 0; at < c->count[axis]; at += step, pieces++) {
        if (!out) continue;
        wb_copy *p = out + pieces;
        *p = *c;
        p->src += at * c->src_stride[axis];
        p->dst += at * c->dst_stride[axis];
        p->count[axis] = c->count[axis] - at < step ? c->count[axis] - at : step;
    }
    return pieces;
}

/* As above, for one run. */
static int64_t cut_run(const wb_copy *c, wb_run *out) {
    int64_t pieces = 0;
    for (int64_t at = 0; at < c->run; at += PIECE_BYTES, pieces++)
        if (out) out[pieces] = (wb_run){c->src + at, c->dst + at, c->run - at < PIECE_BYTES ? c->run - at : PIECE_BYTES};
    return pieces;
}

/* Batches are begun here: where the runs and the other copies of each begin. */
typedef struct {
    wb_batch *batches;
    int64_t num, num_runs, num_copies, in_batch;
} batching;

static void add_to_batch(batching *b, int64_t bytes, int is_run) {
    if (b->in_batch == 0) {
        if (b->batches) b->batches[b->num] = (wb_batch){b->num_runs, b->num_copies};
        b->num++;
    }
    b->in_batch += bytes + ROW_COST_BYTES;
    if (b->in_batch >= BATCH_BYTES) b->in_batch = 0;
    *(is_run ? &b->num_runs : &b->num_copies) += 1;
}

/* The record of a row, absolute and in its simplest form; its count[0] is 0 when the row moves nothing. */
static wb_copy copy_of(const wb_row *row, const uint64_t *sources, const uint64_t *destinations) {
    wb_copy c = {0};
    for (int i = 0; i < 6; i++)
        if (row->count[i] == 0) return c;
    c.src = (const char *)(uintptr_t)(sources[row->src_buffer] + (uint64_t)row->src_offset);
    c.dst = (char *)(uintptr_t)(destinations[row->dst_buffer] + (uint64_t)row->dst_offset);
    memcpy(c.count, row->count, sizeof c.count);
    memcpy(c.src_stride, row->src_stride, sizeof c.src_stride);
    memcpy(c.dst_stride, row->dst_stride, sizeof c.dst_stride);
    c.run = row->itemsize;
    c.op = row->op;
    simplify_axes(&c);
    choose_kind(&c);
    return c;
}

/* Called twice: with t->runs == NULL it only counts (num_runs, num_copies, num_batches, total_bytes); then, with room for
 * these and for one batch more, it writes. */
void wb_prepare(const wb_row *rows, int64_t num_rows, const uint64_t *sources, const uint64_t *destinations, wb_table *t) {
    batching b = {t->batches, 0, 0, 0, 0};
    t->total_bytes = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        wb_copy c = copy_of(rows + r, sources, destinations);
        if (c.run == 0) continue;
        t->total_bytes += copy_bytes(&c);
        if (c.kind == KIND_RUN) {
            int64_t n = cut_run(&c, t->runs ? t->runs + b.num_runs : NULL);
            for (int64_t i = 0; i < n; i++)
                add_to_batch(&b, i + 1 < n ? PIECE_BYTES : c.run - (n - 1) * PIECE_BYTES, 1);
        } else {
            int64_t bytes = copy_bytes(&c), n = cut(&c, t->copies ? t->copies + b.num_copies : NULL);
            for (int64_t i = 0; i < n; i++) add_to_batch(&b, bytes / n, 0);
        }
    }
    if (t->batches) t->batches[b.num] = (wb_batch){b.num_runs, b.num_copies};
    t->num_runs = b.num_runs, t->num_copies = b.num_copies, t->num_batches = b.num;
}

/* --- launching ---------------------------------------------------------------------------------------------------- */

static void run_inner(const wb_copy *c, int inner, char *dst, const char *src, int streaming) {
    int last = c->axes - 1;
    if (c->kind == KIND_TRANSPOSE)
        transpose(dst, c->dst_stride[last - 1], src, c->src_stride[last], c->count[last], c->count[last - 1], c->run,
                  streaming);
    else if (c->kind == KIND_CAST)
        cast_line(c->op, dst, inner ? c->dst_stride[last] : size_after(c->op, c->run), src,
                  inner ? c->src_stride[last] : c->run, inner ? c->count[last] : 1, c->run, streaming,
                  last > 0 ? src + c->src_stride[last - 1] : src);
    else
        copy_line(dst, c->dst_stride[last], src, c->src_stride[last], c->count[last], c->run, streaming);
}

static void run_copy(const wb_copy *c, int streaming) {
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

/* [first, end) of the runs; none beyond num_runs is looked at. */
static void run_runs(const wb_table *t, int64_t first, int64_t end) {
    if (first == end) return;
    const wb_run *const last = t->runs + t->num_runs - 1;
    int64_t nbytes = 0, ahead = 0;
    for (const wb_run *r = t->runs + first; r < t->runs + end; r++) {
        if (r->nbytes != nbytes) nbytes = r->nbytes, ahead = runs_ahead(nbytes);
        const wb_run *next = last - r > ahead ? r + ahead : last, *far = last - next > ahead ? next + ahead : last;
        const int apart = t->streaming && lies_apart(r->src, nbytes, (r < last ? r + 1 : r)->src);
        if (apart) ask_for_page(far->src, nbytes);
        copy_run(r->dst, r->src, nbytes, t->streaming, next->src, apart);
    }
}

typedef struct {
    const wb_table *table;
    int64_t next;
} job;

static void *draw_batches(void *argument) {
    job *j = argument;
    const wb_table *t = j->table;
    for (;;) {
        int64_t b = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (b >= t->num_batches) break;
        const wb_batch *begin = t->batches + b;
        run_runs(t, begin->run, begin[1].run);
        for (int64_t i = begin->copy; i < begin[1].copy; i++) run_copy(t->copies + i, t->streaming);
    }
    streaming_fence();
    return NULL;
}

/* Threads live for one launch: a table is worth it from some MiB on, where starting one costs under 2 %. The table is only
 * read, so launches of one table may run at the same time. */
void wb_launch(const wb_table *table) {
    enum { MAX_THREADS = 16 };
    job j = {table, 0};
    choose_stores();
    pthread_t threads[MAX_THREADS];
    int started = 0;
    while (started + 1 < table->num_threads && started < MAX_THREADS && started + 1 < table->num_batches)
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
    choose_stores();
    for (int64_t i = 0; i < num_writes; i++) total += writes[3 * i + 2];
    for (int64_t i = 0; i < num_writes; i++) {
        const int64_t *w = writes + 3 * i;
        const char *src = source + w[0], *next = source + (i + 1 < num_writes ? w + 3 : w)[0];
        copy_run(destination + w[1], src, w[2], total >= STREAM_WRITES_BYTES, next, lies_apart(src, w[2], next));
    }
    streaming_fence();
}
