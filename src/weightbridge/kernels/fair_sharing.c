/* Max-min fair rates of flows over links: what NICs and switches give to flows that all want as much as they can get.
 *
 * The native form of kernels/fair_sharing.py's NumPy function, which is the specification. Progressive filling: the link
 * that would give each of its flows the least is full first; its flows keep that rate, and their other links have that
 * much less for the rest. A heap of links by that share finds the next one. A share only grows while others are settled,
 * so an entry of the heap may be out of date, and is then put back with its present share.
 */
#include <stdlib.h>

typedef struct {
    double share;
    int32_t link;
} wb_heap_entry;

static inline int wb_entry_before(wb_heap_entry a, wb_heap_entry b) {
    return a.share < b.share || (a.share == b.share && a.link < b.link);
}

static void wb_sift_down(wb_heap_entry *heap, int64_t size, int64_t at) {
    wb_heap_entry moved = heap[at];
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && wb_entry_before(heap[child + 1], heap[child])) child++;
        if (!wb_entry_before(heap[child], moved)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

/* links: [num_flows, width], entries -1 unused; a flow without links is no flow and gets rate 0. load: [num_links] flows on
 * each link. Returns 0, or -1 when there was no memory. */
int wb_fair_rates(int64_t num_flows, int64_t width, const int32_t *links, int64_t num_links, const double *bandwidth,
                  double *rate, int64_t *load) {
    int64_t total = 0;
    memset(load, 0, (size_t)num_links * sizeof *load);
    for (int64_t i = 0; i < num_flows * width; i++)
        if (links[i] >= 0) load[links[i]]++, total++;
    int64_t *first = malloc((size_t)(num_links + 1) * sizeof *first);
    int64_t *open = malloc((size_t)(num_links + 1) * sizeof *open);
    double *left = malloc((size_t)(num_links + 1) * sizeof *left);
    wb_heap_entry *heap = malloc((size_t)(num_links + 1) * sizeof *heap);
    int32_t *flows = malloc((size_t)(total + 1) * sizeof *flows);
    int failed = !first || !open || !left || !heap || !flows;
    if (!failed) {
        int64_t at = 0, size = 0;
        for (int64_t l = 0; l < num_links; l++) {
            first[l] = at, at += load[l], open[l] = 0, left[l] = bandwidth[l];
            if (load[l]) heap[size++] = (wb_heap_entry){bandwidth[l] / (double)load[l], (int32_t)l};
        }
        first[num_links] = at;
        for (int64_t f = 0; f < num_flows; f++) {
            rate[f] = 0;
            for (int64_t j = 0; j < width; j++) {
                int32_t l = links[f * width + j];
                if (l >= 0) flows[first[l] + open[l]++] = (int32_t)f, rate[f] = -1;
            }
        }
        for (int64_t i = size / 2 - 1; i >= 0; i--) wb_sift_down(heap, size, i);
        while (size) {
            int32_t l = heap[0].link;
            double share = open[l] ? left[l] / (double)open[l] : 0;
            if (share < 0) share = 0;
            if (open[l] && share > heap[0].share) {
                heap[0].share = share;
                wb_sift_down(heap, size, 0);
                continue;
            }
            heap[0] = heap[--size];
            if (size) wb_sift_down(heap, size, 0);
            if (!open[l]) continue;
            for (int64_t i = first[l]; i < first[l + 1]; i++) {
                int32_t f = flows[i];
                if (rate[f] >= 0) continue;
                rate[f] = share;
                for (int64_t j = 0; j < width; j++) {
                    int32_t other = links[f * width + j];
                    if (other >= 0) left[other] -= share, open[other]--;
                }
            }
        }
    }
    free(first), free(open), free(left), free(heap), free(flows);
    return failed ? -1 : 0;
}
