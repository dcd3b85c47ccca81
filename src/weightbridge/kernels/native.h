/* Interface of native.c, differences.c, fair_sharing.c and digests.c. Between the markers: what cffi is told, too. */
#include <stdint.h>
/* BEGIN CDEF */
typedef struct {
    int32_t src_buffer, dst_buffer;
    int64_t src_offset, dst_offset;
    int64_t count[6], src_stride[6], dst_stride[6];
    int32_t op, itemsize;
} wb_row;

typedef struct {
    const char *src;
    char *dst;
    int64_t count[6], src_stride[6], dst_stride[6];
    int64_t run;
    int32_t op;
    int16_t axes, kind;
} wb_copy;

typedef struct {
    const char *src;
    char *dst;
    int64_t nbytes;
} wb_run;

typedef struct {
    int64_t run, copy; /* numbers of the first run and the first copy of a batch; the next batch's say where it ends */
} wb_batch;

typedef struct {
    wb_run *runs;
    wb_copy *copies;
    wb_batch *batches;
    int64_t num_runs, num_copies, num_batches, total_bytes;
    int32_t streaming, num_threads;
} wb_table;

void wb_prepare(const wb_row *rows, int64_t num_rows, const uint64_t *sources, const uint64_t *destinations, wb_table *t);
void wb_launch(const wb_table *table);
void wb_copy_writes(const char *source, char *destination, const int64_t *writes, int64_t num_writes);

/* For tests: act as on a processor whose vectors have no more than `bytes` bytes, 16, 32 or 64. For the whole process. */
void wb_limit_vectors(int bytes);

/* A field whose second differences are taken, and the state between calls. start: of the rows of this call, first_row the
 * number of the first of them; row_step, col_step in bytes. An element holds a code when its lowest `shift` bits are zero
 * and the others less `first` are below `modulus`. predicted, slope: [cols], was_slow: [(cols + 1023) / 1024]; all zero at
 * first. Positions are row * cols + col. */
typedef struct {
    const char *start;
    int64_t first_row, rows, cols, row_step, col_step;
    uint64_t first;
    int32_t itemsize, shift, modulus;
    uint16_t *predicted, *slope;
    uint8_t *was_slow;
    int64_t *entry_position;
    uint16_t *entry_residue;
    int64_t max_entries, num_entries;
    int64_t *run_start, *run_length;
    uint64_t *run_bits;
    int64_t max_runs, num_runs;
} wb_field;

int64_t wb_difference(wb_field *f, int64_t row, int wide);

int wb_fair_rates(int64_t num_flows, int64_t width, const int32_t *links, int64_t num_links, const double *bandwidth,
                  double *rate, int64_t *load);

uint64_t wb_digest(const char *memory, const char *segments, int64_t num_segments, int64_t row_step, int64_t column_step);
/* END CDEF */
