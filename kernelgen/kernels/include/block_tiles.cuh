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
