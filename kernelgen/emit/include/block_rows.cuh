// Products with matrices, in tiles of block_tiles.cuh:
// out[n, m, j] = sum over terms of coefficient * in[n, m, k] * weights[w + k * k_stride + j * j_stride + e * of_element].
// A target block is (offset, columns, dim, first term, last term, tiles before it); its terms follow all blocks, each
// (offset of the block of in, its channels, w, k_stride, j_stride, of_element, coefficient). One without becomes zero.
extern "C" __global__ void __launch_bounds__(128) equitune_block_matrices(
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
    REAL sum[4][4] = {};
    for (const long long* term = terms + block[3] * 7; term < terms + block[4] * 7; term += 7) {
        const long long depth = term[1], k_stride = term[3], j_stride = term[4];
        const REAL* const matrix = weights + term[2] + element * term[5] + column0 * j_stride;
        const REAL coefficient = (REAL)__longlong_as_double(term[6]);
        for (long long k0 = 0; k0 < depth; k0 += STEP) {
            for (int at = threadIdx.x; at < NODES * STEP; at += THREADS) {
                const int i = at / STEP, k = at % STEP;
                const long long n = node_of(slots, chunk, i, nodes);
                const bool inside = n >= 0 && k0 + k < depth;
                tiles.a[k][i] = inside ? coefficient * in[n * in_stride + term[0] + m * depth + k0 + k] : (REAL)0;
            }
            for (int at = threadIdx.x; at < STEP * COLUMNS; at += THREADS) {
                // Neighbouring threads read what is next to each other in memory.
                const int k = j_stride == 1 ? at / COLUMNS : at % STEP, j = j_stride == 1 ? at % COLUMNS : at / STEP;
                const bool inside = k0 + k < depth && column0 + j < columns;
                tiles.b[k][j] = inside ? matrix[(k0 + k) * k_stride + j * j_stride] : (REAL)0;
            }
            __syncthreads();
            multiply(tiles, sum);
            __syncthreads();
        }
    }
    for (int i = 0; i < 4; ++i) {
        const long long n = node_of(slots, chunk, threadIdx.x / 16 + 8 * i, nodes);
        for (int j = 0; j < 4; ++j) {
            const long long c = column0 + threadIdx.x % 16 + 16 * j;
            if (n >= 0 && c < columns) out[n * out_stride + block[0] + m * columns + c] = sum[i][j];
        }
    }
}
