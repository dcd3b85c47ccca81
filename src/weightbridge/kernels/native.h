/* Interface of native.c. The text between the markers is also what cffi is told. */
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

int64_t wb_prepare(const wb_row *rows, int64_t num_rows, const uint64_t *sources, const uint64_t *destinations,
                   wb_copy *copies, int64_t *batches, int64_t *num_batches, int64_t *total_bytes);
void wb_launch(const wb_copy *copies, const int64_t *batches, int64_t num_batches, int streaming, int num_threads);
void wb_copy_writes(const char *source, char *destination, const int64_t *writes, int64_t num_writes);
/* END CDEF */
