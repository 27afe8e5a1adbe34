// Rows that pass through shared memory a warp at a time, read ahead: of harmonics on a GPU, after harmonics_gpu.hpp. The
// emitter defines STAGES, the tiles that a warp has in flight, a lane each row. A row of N elements lies STRIDE elements
// after the one before: without gaps, or with 16 bytes between where N elements are a whole number of 16 bytes, so that
// lanes that read their own rows 16 bytes at a time meet no bank twice.
constexpr int TILE = 32;

DEVICE int rows_in(long long tile, long long num_rows) { return int(min(num_rows - tile * TILE, (long long)TILE)); }

// 16 bytes, without waiting for them.
DEVICE void copy_ahead(Real* shared, const Real* from) {
#ifdef __CUDA_ARCH__
    const unsigned to = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
#else
    for (int i = 0; i < WIDTH; ++i) shared[i] = from[i];
#endif
}
// Ends the copies of one tile.
DEVICE void close_tile() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until the oldest of STAGES tiles is there, for all lanes.
DEVICE void await_tile() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
#endif
    __syncwarp(0xffffffffu);
}

template <int N, int STRIDE>
DEVICE int place_in_tile(unsigned i) {
    return STRIDE == N ? i : i / N * STRIDE + i % N;
}
// A tile's rows from memory to shared memory, and back; `count` elements are there, fewer than the tile has only in the last
// one.
template <int N, int STRIDE>
DEVICE void fetch_rows(const Real* __restrict__ rows, Real* __restrict__ shared, int lane, int count) {
    if (count < TILE * N) {
        ONE_TIME for (int i = lane; i < count; i += TILE) shared[place_in_tile<N, STRIDE>(i)] = rows[i];
        return;
    }
    SOME_TIMES for (int i = lane * WIDTH; i < TILE * N; i += TILE * WIDTH)
        copy_ahead(shared + place_in_tile<N, STRIDE>(i), rows + i);
}
template <int N, int STRIDE>
DEVICE void put_rows(const Real* __restrict__ shared, Real* __restrict__ rows, int lane, int count) {
    if (count < TILE * N) {
        ONE_TIME for (int i = lane; i < count; i += TILE) rows[i] = shared[place_in_tile<N, STRIDE>(i)];
        return;
    }
    SOME_TIMES for (int i = lane * WIDTH; i < TILE * N; i += TILE * WIDTH)
        *reinterpret_cast<Pack*>(rows + i) = *reinterpret_cast<const Pack*>(shared + place_in_tile<N, STRIDE>(i));
}
