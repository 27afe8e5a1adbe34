// Products with matrices, in tiles of block_tiles.cuh:
// out[n, m, j] = sum over terms of coefficient * in[n, m, k] * weights[w + k * k_stride + j * j_stride + e * of_element].
// A target block is (offset, columns, dim, first term, last term, tiles before it); its terms follow all blocks, each
// (offset of the block of in, its channels, w, k_stride, j_stride, of_element, coefficient). One without becomes zero.
extern "C" __global__ void __launch_bounds__(128, sizeof(REAL) == 4 ? 4 : 2) equitune_block_matrices(
    const REAL* __restrict__ in, const REAL* __restrict__ weights, REAL* __restrict__ out,
    const long long* __restrict__ table, const long long* __restrict__ slots, const long long* __restrict__ chunks,
    long long nodes, long long in_stride, long long out_stride, long long blocks, long long tiles_each) {
    __shared__ Tiles tiles;
    const long long chunk = blockIdx.x / tiles_each, tile = blockIdx.x % tiles_each;
    const long long* block = table;
    const long long* const terms = table + blocks * 6;
    while (--blocks && block[6 + 5] <= tile) block += 6;
    const long long columns = block[1], across = (columns + COLUMNS - 1) / COLUMNS;
    const long long m = (tile - block[5]) / across, column0 = (tile - block[5]) % across * COLUMNS;
    const long long element = chunks ? chunks[chunk] : 0;
    const int columns_here = int(columns - column0 < COLUMNS ? columns - column0 : COLUMNS);
    // A thread loads one channel of some rows, and places of the matrix.
    constexpr int STEP = sizeof(REAL) == 4 ? DEPTH : DEPTH / 2;  // what registers hold
    constexpr int ROWS = NODES * STEP / THREADS, PLACES = STEP * COLUMNS / THREADS;
    const int channel = threadIdx.x % STEP, first_row = threadIdx.x / STEP;
    const REAL* rows[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const long long n = node_of(slots, chunk, first_row + THREADS / STEP * i, nodes);
        rows[i] = n < 0 ? nullptr : in + n * in_stride + channel;
    }
    REAL sum[4][4] = {}, of_in[ROWS], of_matrix[PLACES];
    for (const long long* term = terms + block[3] * 7; term < terms + block[4] * 7; term += 7) {
        const int depth = int(term[1]);
        const long long k_stride = term[3], j_stride = term[4], from = term[0] + m * depth;
        const REAL coefficient = (REAL)__longlong_as_double(term[6]);
        // Neighbouring threads read what is next to each other in memory: 64 columns, or 8 rows of the matrix.
        const bool along_j = j_stride == 1;
        const int first_k = along_j ? threadIdx.x / 64 : threadIdx.x % 8;
        const int first_j = along_j ? threadIdx.x % 64 : threadIdx.x / 8;
        const REAL* const matrix =
            weights + term[2] + element * term[5] + first_k * k_stride + (column0 + first_j) * j_stride;
        const auto k_of = [&](int i) { return along_j ? first_k + 2 * i : first_k + i % (STEP / 8) * 8; };
        const auto j_of = [&](int i) { return along_j ? first_j : first_j + i / (STEP / 8) * 16; };
        const auto fetch = [&](int k0) {
            for (int i = 0; i < ROWS; ++i)
                of_in[i] = rows[i] && k0 + channel < depth ? rows[i][from + k0] : (REAL)0;
            for (int i = 0; i < PLACES; ++i) {
                const bool inside = k0 + k_of(i) < depth && j_of(i) < columns_here;
                of_matrix[i] = inside ? matrix[(k0 + k_of(i) - first_k) * k_stride + (j_of(i) - first_j) * j_stride] : (REAL)0;
            }
        };
        fetch(0);
        for (int k0 = 0; k0 < depth; k0 += STEP) {
            for (int i = 0; i < ROWS; ++i) tiles.a[first_row + THREADS / STEP * i][channel] = coefficient * of_in[i];
            for (int i = 0; i < PLACES; ++i) tiles.b[k_of(i)][j_of(i)] = of_matrix[i];
            __syncthreads();
            if (k0 + STEP < depth) fetch(k0 + STEP);  // on its way during the product
            multiply<STEP>(tiles, sum);
            __syncthreads();
        }
    }
    for (int i = 0; i < 4; ++i) {
        const long long n = node_of(slots, chunk, threadIdx.x / 16 + 8 * i, nodes);
        for (int j = 0; j < 4; ++j) {
            const long long c = column0 + threadIdx.x % 16 * 4 + j;
            if (n >= 0 && c < columns) out[n * out_stride + block[0] + m * columns + c] = sum[i][j];
        }
    }
}
