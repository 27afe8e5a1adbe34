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
    // A thread has a column of x and one of y, of some nodes of a chunk.
    constexpr int OF_X = NODES * NODES / THREADS, OF_Y = NODES * COLUMNS / THREADS;
    const int dim = int(path[7]), r = threadIdx.x % NODES, c = threadIdx.x % COLUMNS;
    const REAL* const from_x = x + path[0] + row0 + r;
    const REAL* const from_y = y + path[1] + column0 + c;
    REAL sum[4][4] = {}, of_x[OF_X], of_y[OF_Y];
    const auto fetch = [&](long long chunk, int m) {
        for (int i = 0; i < OF_X; ++i) {
            const long long n = node_of(slots, chunk, threadIdx.x / NODES + THREADS / NODES * i, nodes);
            of_x[i] = n >= 0 && row0 + r < rows ? from_x[n * x_stride + m * rows] : (REAL)0;
        }
        for (int i = 0; i < OF_Y; ++i) {
            const long long n = node_of(slots, chunk, threadIdx.x / COLUMNS + THREADS / COLUMNS * i, nodes);
            of_y[i] = n >= 0 && column0 + c < columns ? from_y[n * y_stride + m * columns] : (REAL)0;
        }
    };
    long long chunk = begin;
    if (begin < end) fetch(begin, 0);
    for (int m = 0; chunk < end;) {
        for (int i = 0; i < OF_X; ++i) tiles.a[r][threadIdx.x / NODES + THREADS / NODES * i] = of_x[i];
        for (int i = 0; i < OF_Y; ++i) tiles.b[threadIdx.x / COLUMNS + THREADS / COLUMNS * i][c] = of_y[i];
        __syncthreads();
        if (++m == dim) m = 0, ++chunk;
        if (chunk < end) fetch(chunk, m);  // on its way during the product
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
