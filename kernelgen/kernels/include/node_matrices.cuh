// Matrices over blocks of nodes' features: rows, and gradients by weights.
// A kernel includes sections; one that speaks of NAME.cuh means the section NAME.
//// block_tiles
// The common part of block_rows.cuh and block_weights.cuh: products of node features with matrices, all blocks of a row
// in one launch.
// Rows hold blocks of [dim, channels]; a chunk is 32 nodes, of one element where matrices depend on it: node i of chunk
// c is slots[32 c + i] (-1 for none), or 32 c + i without slots. A block of threads has a tile of 32 by 64 results.
// REAL is the type of an element.
const int NODES = 32, DEPTH = 32, COLUMNS = 64, THREADS = 128;

__device__ __forceinline__ long long node_of(const long long* slots, long long chunk, int i, long long nodes) {
    const long long slot = chunk * NODES + i;
    if (slots) return slots[slot];
    return slot < nodes ? slot : -1;
}

// Four elements that are loaded at once.
struct alignas(16) Four {
    REAL v[4];
};
// Rows of a are the results' rows; those of b go along the depth. Four elements after each row, so that threads which read
// a column together find different banks.
struct Tiles {
    alignas(16) REAL a[NODES][DEPTH + 4];
    alignas(16) REAL b[DEPTH][COLUMNS + 4];
};

// Adds the product of the tiles, of the first STEP of their depth. A thread has rows threadIdx / 16 + 8 i and columns
// 4 (threadIdx % 16) + j of the results.
template <int STEP>
__device__ __forceinline__ void multiply(const Tiles& tiles, REAL (&sum)[4][4]) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16 * 4;
#pragma unroll 2
    for (int k = 0; k < STEP; k += 4) {
        Four a[4], b[4];
        for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const Four*>(&tiles.a[row + 8 * i][k]);
        for (int n = 0; n < 4; ++n) b[n] = *reinterpret_cast<const Four*>(&tiles.b[k + n][column]);
        for (int n = 0; n < 4; ++n)
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) sum[i][j] += a[i].v[n] * b[n].v[j];
    }
}
//// block_rows
// Products with matrices, in tiles of block_tiles.cuh:
// out[n, m, j] = sum over terms of coefficient * in[n, m, k] * weights[w + k * k_stride + j * j_stride + e * of_element].
// A target block is (offset, columns, dim, first term, last term, tiles before it); its terms follow all blocks, each
// (offset of the block of in, its channels, w, k_stride, j_stride, of_element, coefficient). One without becomes zero.

// A thread's part of a step along the depth: one channel of some rows, and places of the matrix. Neighbouring threads
// read what is next to each other in memory: 64 columns if ALONG_J, or 8 rows.
constexpr int STEP = sizeof(REAL) == 4 ? DEPTH : DEPTH / 2;  // what registers hold
constexpr int ROWS = NODES * STEP / THREADS, PLACES = STEP * COLUMNS / THREADS;
template <bool ALONG_J>
struct Place {
    const int k = ALONG_J ? threadIdx.x / 64 : threadIdx.x % 8, j = ALONG_J ? threadIdx.x % 64 : threadIdx.x / 8;
    __device__ __forceinline__ int k_of(int i) const { return k + (ALONG_J ? 2 * i : i % (STEP / 8) * 8); }
    __device__ __forceinline__ int j_of(int i) const { return j + (ALONG_J ? 0 : i / (STEP / 8) * 16); }
};

// Adds a term: rows, from a channel on, times a matrix whose rows, or columns, are `stride` apart; the next step's
// elements are on their way during the product.
template <bool ALONG_J>
__device__ __forceinline__ void add_term(Tiles& tiles, const REAL* const (&rows)[ROWS], long long from, const REAL* matrix,
                                         int stride, int depth, int columns, REAL coefficient, REAL (&sum)[4][4]) {
    const Place<ALONG_J> place;
    const int channel = threadIdx.x % STEP, first_row = threadIdx.x / STEP;
    matrix += ALONG_J ? place.k * stride + place.j : place.j * stride + place.k;
    REAL of_rows[ROWS], of_matrix[PLACES];
    const auto fetch = [&](int k0) {
        for (int i = 0; i < ROWS; ++i)
            of_rows[i] = rows[i] && k0 + channel < depth ? rows[i][from + k0] : (REAL)0;
        const REAL* const here = matrix + (ALONG_J ? k0 * stride : k0);
        for (int i = 0; i < PLACES; ++i) {
            const int k = place.k_of(i) - place.k, j = place.j_of(i) - place.j;
            const bool inside = k0 + place.k_of(i) < depth && place.j_of(i) < columns;
            of_matrix[i] = inside ? here[ALONG_J ? k * stride : j * stride + k] : (REAL)0;
        }
    };
    for (int k0 = -STEP; k0 < depth; k0 += STEP) {
        if (k0 >= 0) {
            for (int i = 0; i < ROWS; ++i) tiles.a[first_row + THREADS / STEP * i][channel] = coefficient * of_rows[i];
            for (int i = 0; i < PLACES; ++i) tiles.b[place.k_of(i)][place.j_of(i)] = of_matrix[i];
            __syncthreads();
        }
        if (k0 + STEP < depth) fetch(k0 + STEP);
        if (k0 >= 0) {
            multiply<STEP>(tiles, sum);
            __syncthreads();
        }
    }
}

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
    const REAL* rows[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const long long n = node_of(slots, chunk, threadIdx.x / STEP + THREADS / STEP * i, nodes);
        rows[i] = n < 0 ? nullptr : in + n * in_stride + threadIdx.x % STEP;
    }
    REAL sum[4][4] = {};
    for (const long long* term = terms + block[3] * 7; term < terms + block[4] * 7; term += 7) {
        const int depth = int(term[1]);
        const int k_stride = int(term[3]), j_stride = int(term[4]);
        const long long from = term[0] + m * depth;
        const REAL* const matrix = weights + term[2] + element * term[5] + column0 * j_stride;
        const REAL coefficient = (REAL)__longlong_as_double(term[6]);
        if (j_stride == 1)
            add_term<true>(tiles, rows, from, matrix, k_stride, depth, columns_here, coefficient, sum);
        else  // then neighbours along the depth are neighbours in memory
            add_term<false>(tiles, rows, from, matrix, j_stride, depth, columns_here, coefficient, sum);
    }
    for (int i = 0; i < 4; ++i) {
        const long long n = node_of(slots, chunk, threadIdx.x / 16 + 8 * i, nodes);
        for (int j = 0; j < 4; ++j) {
            const long long c = column0 + threadIdx.x % 16 * 4 + j;
            if (n >= 0 && c < columns) out[n * out_stride + block[0] + m * columns + c] = sum[i][j];
        }
    }
}
//// block_weights
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
