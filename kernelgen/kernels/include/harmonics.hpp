// How kernels of harmonics move the rows of their vectors and results.
// A kernel includes sections; one that speaks of NAME.hpp means the section NAME.
//// harmonics_gpu
// The hand-written part of a GPU's kernel of spherical harmonics. The emitter defines before it: Real, DIM (elements of a
// row of harmonics), BLOCK (vectors of a block), STRIDE (elements from row to row in shared memory) and WIDTH (elements
// that a thread copies at a time). STEP is the distance of two components of a vector's row where the statements find them.
#define DEVICE __device__ __forceinline__
#define SOME_TIMES _Pragma("unroll 4")
#define UNROLL _Pragma("unroll")
#define ONE_TIME _Pragma("unroll 1")
constexpr int STEP = 1;

struct alignas(WIDTH * sizeof(Real)) Pack {
    Real at[WIDTH];
};

// Where element i of a block's rows lies in shared memory.
DEVICE int place(unsigned i) { return i / DIM * STRIDE + i % DIM; }

// `count` elements of rows that lie together, by all threads of a block: from memory to shared memory, and back. Of a
// whole block FEW copies of a thread are under way at once: none waits for the one before it.
constexpr unsigned PACKS = BLOCK * DIM / WIDTH;
constexpr int FEW = 4;
DEVICE bool is_pack(unsigned first) { return first + BLOCK <= PACKS || first + threadIdx.x < PACKS; }

DEVICE void load_rows(const Real* __restrict__ rows, Real* __restrict__ shared, int count) {
    if (count < BLOCK * DIM) {
        ONE_TIME for (int i = threadIdx.x; i < count; i += BLOCK) shared[place(i)] = rows[i];
        return;
    }
    UNROLL for (unsigned first = 0; first < PACKS; first += FEW * BLOCK) {
        Pack pack[FEW];
        UNROLL for (int k = 0; k < FEW; ++k)
            if (is_pack(first + k * BLOCK)) pack[k] = reinterpret_cast<const Pack*>(rows)[first + k * BLOCK + threadIdx.x];
        UNROLL for (int k = 0; k < FEW; ++k)
            if (is_pack(first + k * BLOCK))
                UNROLL for (int j = 0; j < WIDTH; ++j)
                    shared[place((first + k * BLOCK + threadIdx.x) * WIDTH + j)] = pack[k].at[j];
    }
}
DEVICE void store_rows(const Real* __restrict__ shared, Real* __restrict__ rows, int count) {
    if (count < BLOCK * DIM) {
        ONE_TIME for (int i = threadIdx.x; i < count; i += BLOCK) rows[i] = shared[place(i)];
        return;
    }
    UNROLL for (unsigned first = 0; first < PACKS; first += BLOCK) {
        if (!is_pack(first)) return;
        Pack pack;
        UNROLL for (int j = 0; j < WIDTH; ++j) pack.at[j] = shared[place((first + threadIdx.x) * WIDTH + j)];
        reinterpret_cast<Pack*>(rows)[first + threadIdx.x] = pack;
    }
}
//// pipeline
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
//// harmonics_host
// The hand-written part of a host kernel of spherical harmonics. The emitter defines before it: Real, DIM (elements of a row
// of harmonics) and BLOCK (vectors of a block). STEP is the distance of two components of a vector's row where the
// statements find them.
#define DEVICE static inline __attribute__((always_inline))
constexpr int STEP = BLOCK;

// A square of LANES x LANES elements changes sides in registers: J. O. Eklundh, IEEE Trans. Comput. C-21, 801 (1972).
constexpr int LANES = 32 / sizeof(Real);
typedef Real Lanes __attribute__((vector_size(32)));

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
template <int S, std::size_t... K>
DEVICE void exchange(Lanes& a, Lanes& b, std::index_sequence<K...>) {
#if __has_builtin(__builtin_shufflevector)
    const Lanes low = __builtin_shufflevector(a, b, (K & S ? LANES + K - S : K)...);
    const Lanes high = __builtin_shufflevector(a, b, (K & S ? LANES + K : K + S)...);
#else
    const Lanes low = {(K & S ? b[K - S * bool(K & S)] : a[K])...};
    const Lanes high = {(K & S ? b[K] : a[K & S ? K : K + S])...};
#endif
    a = low, b = high;
}
template <int S>
DEVICE void exchange_all(Lanes (&row)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & S)) exchange<S>(row[i], row[i + S], std::make_index_sequence<LANES>());
    if constexpr (S > 1) exchange_all<S / 2>(row);
}
DEVICE void turn(const Real* __restrict__ from, int from_stride, Real* __restrict__ to, int to_stride) {
    Lanes row[LANES];
    for (int i = 0; i < LANES; ++i) std::memcpy(&row[i], from + i * from_stride, sizeof(Lanes));
    exchange_all<LANES / 2>(row);
    for (int i = 0; i < LANES; ++i) std::memcpy(to + i * to_stride, &row[i], sizeof(Lanes));
}

// Rows of N elements to columns of BLOCK elements, with zeros where a block has fewer rows, and back. The last square
// of a row overlaps the one before it.
template <int N>
static inline void load_columns(const Real* __restrict__ rows, int count, Real* __restrict__ columns) {
    int i = 0;
    if constexpr (N >= LANES)
        for (; i + LANES <= count; i += LANES)
            for (int c = 0; c < N; c += LANES) {
                const int first = c < N - LANES ? c : N - LANES;
                turn(rows + i * N + first, N, columns + first * BLOCK + i, BLOCK);
            }
    for (; i < count; ++i)
        for (int c = 0; c < N; ++c) columns[c * BLOCK + i] = rows[i * N + c];
    for (; i < BLOCK; ++i)
        for (int c = 0; c < N; ++c) columns[c * BLOCK + i] = Real(0);
}
template <int N>
static inline void store_columns(const Real* __restrict__ columns, int count, Real* __restrict__ rows) {
    int i = 0;
    if constexpr (N >= LANES)
        for (; i + LANES <= count; i += LANES)
            for (int c = 0; c < N; c += LANES) {
                const int first = c < N - LANES ? c : N - LANES;
                turn(columns + first * BLOCK + i, BLOCK, rows + i * N + first, N);
            }
    for (; i < count; ++i)
        for (int c = 0; c < N; ++c) rows[i * N + c] = columns[c * BLOCK + i];
}
