// The common part of block_rows.cuh and block_weights.cuh: products of node features with matrices, all blocks of a row
// in one launch.
// Rows hold blocks of [dim, channels]; a chunk is 32 nodes, of one element where matrices depend on it: node i of chunk
// c is slots[32 c + i] (-1 for none), or 32 c + i without slots. A block of threads has a tile of 32 by 64 results.
// REAL is the type of an element.
const int NODES = 32, STEP = 32, COLUMNS = 64, THREADS = 128;

__device__ __forceinline__ long long node_of(const long long* slots, long long chunk, int i, long long nodes) {
    const long long slot = chunk * NODES + i;
    if (slots) return slots[slot];
    return slot < nodes ? slot : -1;
}

struct Tiles {
    REAL a[STEP][NODES + 1], b[STEP][COLUMNS + 1];
};

// Adds the product of a tile's transpose with the other; each thread has 4 x 4 results.
__device__ __forceinline__ void multiply(const Tiles& tiles, REAL (&sum)[4][4]) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    for (int k = 0; k < STEP; ++k) {
        REAL a[4], b[4];
        for (int i = 0; i < 4; ++i) a[i] = tiles.a[k][row + 8 * i];
        for (int j = 0; j < 4; ++j) b[j] = tiles.b[k][column + 16 * j];
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) sum[i][j] += a[i] * b[j];
    }
}
