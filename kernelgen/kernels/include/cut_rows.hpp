// Rows that runs of edges in the order of their receivers do not store: a run stores the rows whose edges it has all. A
// row with edges in several runs is cut: zeros are written to it, and each of these runs adds to it. A row without edges
// gets zeros alone.

// Whether the edges at two places of the order have one receiver. perm: the order, or null for that in memory.
DEVICE bool is_one_row(const index_t* receiver, const int* perm, int a, int b) {
    return receiver[perm ? perm[a] : a] == receiver[perm ? perm[b] : b];
}

// A block's share of the rows without edges and of the cut ones, with runs of `each` edges. Each lane looks at a row, then
// its warp writes those of its lanes, one after the other. Rows go to the warps in turn: the longest come first.
template <int WIDTH>
DEVICE void zero_cut_rows(Real* out, int elements, const int* spans, long long rows, int each, int writers) {
    const Real zeros[WIDTH] = {};
    const int lane = threadIdx.x % 32, warps = writers * (int(blockDim.x) / 32);
    const int warp = blockIdx.x * (int(blockDim.x) / 32) + int(threadIdx.x) / 32;
#pragma unroll 1
    for (long long first = warp; first < rows; first += 32ll * warps) {
        const long long mine = first + (long long)lane * warps;
        int row = -1;
        if (mine < rows) {
            const int begin = spans[3 * mine + 1], end = spans[3 * mine + 2];
            if (begin == end || begin / each != (end - 1) / each) row = spans[3 * mine];
        }
#pragma unroll 1
        for (int l = 0; l < 32; ++l) {
            const long long zeroed = __shfl_sync(0xffffffffu, row, l, 32);
            if (zeroed < 0) continue;
            for (int i = lane * WIDTH; i < elements; i += 32 * WIDTH) store<WIDTH>(out + zeroed * elements + i, zeros);
        }
    }
}
