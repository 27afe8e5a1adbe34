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

//// block_multiply
// A thread's results of a tile are sum[i][j], in row row_of(i) and column column_of(i) + j; operand: what tiles hold of a
// number.
__device__ __forceinline__ REAL operand(REAL value) { return value; }
__device__ __forceinline__ int row_of(int i) { return threadIdx.x / 16 + 8 * i; }
__device__ __forceinline__ int column_of(int i) { return threadIdx.x % 16 * 4; }

// Adds the product of the tiles, of the first STEP of their depth.
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
//// block_multiply_tf32
// The same in tensor cores (mma.m16n8k8, sm_80 on): numbers are rounded to TF32, sums are float32. A warp has 16 rows and
// 32 columns, in four products of 8: of a product, column n is column 4 n + its number, so that a lane loads four at once.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float operand(float value) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
    return __uint_as_float(rounded);
}
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
#endif
__device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 % 2 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return threadIdx.x / 64 * 32 + 4 * (threadIdx.x % 4 * 2 + i % 2); }

// As above. Of 8 along the depth a lane has 2 quad and 2 quad + 1.
template <int STEP>
__device__ __forceinline__ void multiply(const Tiles& tiles, float (&sum)[4][4]) {
    const int row = row_of(0), quad = threadIdx.x % 4, group = threadIdx.x % 32 / 4, first = threadIdx.x / 64 * 32;
#pragma unroll 2
    for (int k = 0; k < STEP; k += 8) {
        const int at = k + 2 * quad;
        const float a[4] = {tiles.a[row][at], tiles.a[row + 8][at], tiles.a[row][at + 1], tiles.a[row + 8][at + 1]};
        const Four low = *reinterpret_cast<const Four*>(&tiles.b[at][first + 4 * group]);
        const Four high = *reinterpret_cast<const Four*>(&tiles.b[at + 1][first + 4 * group]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float d[4] = {sum[0][n], sum[1][n], sum[2][n], sum[3][n]};
            multiply_add_tf32(d, a, {low.v[n], high.v[n]});
            for (int i = 0; i < 4; ++i) sum[i][n] = d[i];
        }
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
            for (int i = 0; i < ROWS; ++i) tiles.a[first_row + THREADS / STEP * i][channel] = operand(coefficient * of_rows[i]);
            for (int i = 0; i < PLACES; ++i) tiles.b[place.k_of(i)][place.j_of(i)] = operand(of_matrix[i]);
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
        const long long n = node_of(slots, chunk, row_of(i), nodes);
        for (int j = 0; j < 4; ++j) {
            const long long c = column0 + column_of(i) + j;
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
        for (int i = 0; i < OF_X; ++i) tiles.a[r][threadIdx.x / NODES + THREADS / NODES * i] = operand(of_x[i]);
        for (int i = 0; i < OF_Y; ++i) tiles.b[threadIdx.x / COLUMNS + THREADS / COLUMNS * i][c] = operand(of_y[i]);
        __syncthreads();
        if (++m == dim) m = 0, ++chunk;
        if (chunk < end) fetch(chunk, m);  // on its way during the product
        multiply<NODES>(tiles, sum);
        __syncthreads();
    }
    const REAL coefficient = (REAL)__longlong_as_double(path[8]);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            const long long r = row0 + row_of(i), c = column0 + column_of(i) + j;
            if (r < rows && c < columns)
                out[part * numel + path[2] + r * path[3] + element * path[4] + c] = coefficient * sum[i][j];
        }
}
