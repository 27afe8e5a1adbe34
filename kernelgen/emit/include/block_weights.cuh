// Gradients by matrices, in tiles of block_tiles.cuh:
// out[w + r * stride + e * of_element + c] = coefficient * sum of x[n, r] y[n, c] over the nodes n of element e and the
// components of a block. A path is (x, y, w, stride, of_element, rows, columns, dim, coefficient, tiles before it). An
// element has the chunks from begins[e] to begins[e + 1], or all without begins. Each of `parts` sums some chunks, into a
// row of its own.
extern "C" __global__ void __launch_bounds__(128, 4) equitune_block_matrices(
    const REAL* __restrict__ x, const REAL* __restrict__ y, REAL* __restrict__ out, const long long* __restrict__ table,
    const long long* __restrict__ slots, const long long* __restrict__ begins, long long nodes, long long x_stride,
    long long y_stride, long long paths, long long tiles_each, long long elements, long long parts,
    long long numel) {
    __shared__ Tiles tiles;
    const long long part = blockIdx.x % parts, element = blockIdx.x / parts % elements;
    const long long tile = blockIdx.x / parts / elements;
    const long long* path = table;
    while (--paths && path[10 + 9] <= tile) path += 10;
    const long long rows = path[5], columns = path[6], across = (columns + COLUMNS - 1) / COLUMNS;
    const long long row0 = (tile - path[9]) / across * NODES, column0 = (tile - path[9]) % across * COLUMNS;
    long long begin = 0, end = (nodes + NODES - 1) / NODES;
    if (begins) begin = begins[element], end = begins[element + 1];
    const long long each = (end - begin + parts - 1) / parts;
    begin += part * each;
    if (begin + each < end) end = begin + each;
    REAL sum[4][4] = {};
    for (long long chunk = begin; chunk < end; ++chunk)
        for (long long m = 0; m < path[7]; ++m) {
            for (int at = threadIdx.x; at < NODES * NODES; at += THREADS) {
                const int k = at / NODES, r = at % NODES;
                const long long n = node_of(slots, chunk, k, nodes);
                tiles.a[r][k] = n >= 0 && row0 + r < rows ? x[n * x_stride + path[0] + m * rows + row0 + r] : (REAL)0;
            }
            for (int at = threadIdx.x; at < NODES * COLUMNS; at += THREADS) {
                const int k = at / COLUMNS, c = at % COLUMNS;
                const long long n = node_of(slots, chunk, k, nodes);
                const bool inside = n >= 0 && column0 + c < columns;
                tiles.b[k][c] = inside ? y[n * y_stride + path[1] + m * columns + column0 + c] : (REAL)0;
            }
            __syncthreads();
            multiply<NODES>(tiles, sum);
            __syncthreads();
        }
    const REAL coefficient = (REAL)__longlong_as_double(path[8]);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            const long long r = row0 + threadIdx.x / 16 + 8 * i, c = column0 + threadIdx.x % 16 * 4 + j;
            if (r < rows && c < columns)
                out[part * numel + path[2] + r * path[3] + element * path[4] + c] = coefficient * sum[i][j];
        }
}
