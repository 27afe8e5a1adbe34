// Shares of the edges of parts that follow each other: where a block's begin, and a warp's first receiver.

// The edges of a part before a place where one block ends and another begins. That is not so near to an end of the part
// that one of them would load the part's matrix for fewer than 8 edges a warp.
DEVICE long long edges_until(long long place, long long edges) {
    constexpr int FEW = THREADS / 4;
    if (place >= edges) return edges;
    return place < FEW ? 0 : place > edges - FEW ? edges : place;
}

// The first of the spans (node, first edge, end) that ends behind an edge; spans are in the order of edges. The lanes of a
// warp look at 32 places at a time. All of them call it.
DEVICE int run_of(const Warp& warp, const int* spans, int count, int edge) {
    int low = 0;  // the run is one of low .. count, where count stands for none
    while (low < count) {
        const int each = (count - low + 31) / 32, last = low + (warp.lane + 1) * each - 1;
        const bool is_before = last < count && spans[3 * last + 2] <= edge;
        low += __popc(__ballot_sync(0xffffffffu, is_before)) * each;
        count = min(count, low + each - 1);
    }
    return count;
}
