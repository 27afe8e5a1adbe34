// How parts of the edges are divided equally. A part's work is that of its edges, 1 each, and of its receivers with edges:
// these add OF_RECEIVER each, which a kernel states for a path group. What is divided is places in this work.

// The first of the spans (node, first edge, end) that ends behind a place; spans are in the order of edges. The lanes of a
// warp look at 32 of them at a time. All of them call it.
template <int OF_RECEIVER>
DEVICE int run_at(const Warp& warp, const int* spans, int count, long long place) {
    int low = 0;  // the run is one of low .. count, where count stands for none
    while (low < count) {
        const int each = (count - low + 31) / 32, last = low + (warp.lane + 1) * each - 1;
        const bool is_before = last < count && spans[3 * last + 2] + (last + 1ll) * OF_RECEIVER <= place;
        low += __popc(__ballot_sync(0xffffffffu, is_before)) * each;
        count = min(count, low + each - 1);
    }
    return count;
}
// That of an edge.
DEVICE int run_of(const Warp& warp, const int* spans, int count, int edge) { return run_at<0>(warp, spans, count, edge); }

// The edge at a place of the work of some runs, of which the last one has edges. A receiver comes before its edges.
template <int OF_RECEIVER>
DEVICE int edge_at_work(const Warp& warp, const int* spans, int count, long long place) {
    const int run = run_at<OF_RECEIVER>(warp, spans, count, place);
    if (run == count) return spans[3 * count - 1];
    const int first = spans[3 * run + 1];
    return first + max(0, int(place - first - (run + 1ll) * OF_RECEIVER));
}

// A place in a part's work where one block ends and another begins. That is not so near to an end of the part that one of
// them would load the part's matrix for fewer than 8 edges a warp.
DEVICE long long work_until(long long place, long long work) {
    constexpr int FEW = THREADS / 4;
    if (place >= work) return work;
    return place < FEW ? 0 : place > work - FEW ? work : place;
}
// The places begin .. end - 1 that a block has in the work of a part. The works of all parts, times their costs, follow each
// other; the part's begins at `start` of `whole`.
struct Places {
    long long begin, end;
};
DEVICE Places places_of_block(long long whole, long long start, int cost, long long work) {
    const long long from = whole * blockIdx.x / gridDim.x, to = whole * (blockIdx.x + 1) / gridDim.x;
    return {work_until((from - start) / cost, work), work_until((to - start) / cost, work)};
}
// The same number, of which compilers do not know that: they compute anew what follows from it, and keep no registers.
DEVICE int unknown(int number) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(number));
#endif
    return number;
}
