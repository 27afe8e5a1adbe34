// Rows that pass through shared memory a warp at a time, of harmonics on a GPU, after harmonics.hpp: a tile of rows, a lane
// each. A row of N elements lies STRIDE elements after the one before: without gaps, or with 16 bytes between where N
// elements are an even number of them, so that neither lanes that access their own rows nor lanes that copy 16 bytes each
// meet a bank twice.
#define MANY_TIMES _Pragma("unroll 8")
#define ONE_TIME _Pragma("unroll 1")
constexpr int TILE = 32, COPIED = TILE * WIDTH;  // elements that a warp copies at a time

DEVICE int rows_in(long long tile, long long num_rows) { return int(min(num_rows - tile * TILE, (long long)TILE)); }

// Where element i of a tile is.
template <int N, int STRIDE>
DEVICE int place_in_tile(unsigned i) {
    return STRIDE == N ? i : i / N * STRIDE + i % N;
}
// Where a lane's k-th WIDTH elements are: a constant apart from where its first ones are, if whole rows lie between.
template <int N, int STRIDE>
DEVICE int place_of_copy(int lane, int k) {
    if (COPIED % N == 0) return place_in_tile<N, STRIDE>(lane * WIDTH) + k * (COPIED / N * STRIDE);
    return place_in_tile<N, STRIDE>(k * COPIED + lane * WIDTH);
}
template <int N>
DEVICE bool is_in_tile(int lane, int k) {
    return (k + 1) * COPIED <= TILE * N || k * COPIED + lane * WIDTH < TILE * N;
}
// From memory to shared memory, and back; `count` elements are there, fewer than the tile has only in the last one.
template <int N, int STRIDE>
DEVICE void load_tile(const Real* __restrict__ rows, Real* __restrict__ shared, int lane, int count) {
    if (count < TILE * N) {
        ONE_TIME for (int i = lane; i < count; i += TILE) shared[place_in_tile<N, STRIDE>(i)] = rows[i];
        return;
    }
    MANY_TIMES for (int k = 0; k * COPIED < TILE * N; ++k)
        if (is_in_tile<N>(lane, k))
            *reinterpret_cast<Pack*>(shared + place_of_copy<N, STRIDE>(lane, k)) =
                *reinterpret_cast<const Pack*>(rows + k * COPIED + lane * WIDTH);
}
template <int N, int STRIDE>
DEVICE void store_tile(const Real* __restrict__ shared, Real* __restrict__ rows, int lane, int count) {
    if (count < TILE * N) {
        ONE_TIME for (int i = lane; i < count; i += TILE) rows[i] = shared[place_in_tile<N, STRIDE>(i)];
        return;
    }
    MANY_TIMES for (int k = 0; k * COPIED < TILE * N; ++k)
        if (is_in_tile<N>(lane, k))
            *reinterpret_cast<Pack*>(rows + k * COPIED + lane * WIDTH) =
                *reinterpret_cast<const Pack*>(shared + place_of_copy<N, STRIDE>(lane, k));
}
