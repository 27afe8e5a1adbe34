// Sums over the rows of each element. A span is (element, begin, end): its nodes are begin..end of the nodes in the order
// of elements. Task t, of task_nodes nodes, has its sums of element e in row t + e, and only such rows are written.
// A block has 128 columns of a span: its 16 warps take every 16th row, and the first adds up what they found, always in
// the same order. REAL is the type of an element.
extern "C" __global__ void __launch_bounds__(512) equitune_contraction_sums(
    const REAL* __restrict__ rows, const int* __restrict__ spans, REAL* __restrict__ out, long long width,
    long long task_nodes, long long parts) {
    __shared__ REAL found[16][128];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int* const span = spans + blockIdx.x / parts * 3;
    const long long element = span[0], begin = span[1], end = span[2];
    const long long first = blockIdx.x % parts * 128 + lane;
    REAL sum[4] = {0, 0, 0, 0};
    if (begin < end) {
        const long long last = (end - 1) / task_nodes + element;
        for (long long row = begin / task_nodes + element + warp; row <= last; row += 16)
            for (int i = 0; i < 4; ++i)
                if (first + i * 32 < width) sum[i] += rows[row * width + first + i * 32];
        for (int i = 0; i < 4; ++i) found[warp][lane + i * 32] = sum[i];
        __syncthreads();
        if (warp == 0)
            for (int i = 0; i < 4; ++i)
                for (int other = 1; other < 16; ++other) sum[i] += found[other][lane + i * 32];
    }
    if (warp == 0)
        for (int i = 0; i < 4; ++i)
            if (first + i * 32 < width) out[element * width + first + i * 32] = sum[i];
}
