// What kernels of products take beside device.cuh, each for a knob of the schedule.
// A kernel includes sections; one that speaks of NAME.cuh means the section NAME.
//// weight_ring
// Copies to shared memory that a lane does not wait for: sixteen bytes, the end of a group of copies, and until no more
// than COUNT of a lane's groups are under way.
DEVICE void fetch16(Real* to, const Real* from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    for (int i = 0; i < int(16 / sizeof(Real)); ++i) to[i] = from[i];
#endif
}
DEVICE void end_fetch() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int COUNT>
DEVICE void await_fetches() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}
//// zero_outputs
// Zeros that the first blocks of a kernel write to what the others add to, who wait for that before their first sum. The
// stream has lines of the cache for it: `written`, how many blocks have written theirs, which is zero again when all
// have, and COPIES of the number of the last launch whose zeros are there, so that not every block asks the same line.
// The first blocks start first and wait for none.
#define ZEROS_INSIDE 1
constexpr int LINE = 16, COPIES = 32;  // words of 8 bytes

DEVICE void ask_line(const unsigned long long* p) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
// Where a block that waits looks.
DEVICE const unsigned long long* ready_of(const unsigned long long* written) {
    return written + LINE * (1 + blockIdx.x % COPIES);
}

// A block's share of an array that begins at a multiple of 16 bytes.
template <class T>
DEVICE void write_zeros(T* out, long long count, int writers) {
    const long long quads = count * sizeof(T) / 16, rest = count - quads * 16 / sizeof(T);
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
#pragma unroll 1
    for (long long i = first; i < quads; i += writers * (long long)blockDim.x)
        reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    if (first < rest) out[count - rest + first] = 0;
}

// No fences of their own: where there is one, the compiler makes sums that nobody reads wait for what was there.
DEVICE void tell_of_zeros(unsigned long long* written, unsigned long long launch, unsigned writers) {
    __syncthreads();
    if (threadIdx.x >= COPIES) return;
    if (writers > 1) {
        unsigned before = 0;
        if (threadIdx.x == 0) {
#ifdef __CUDA_ARCH__
            asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                         : "=r"(before) : "l"(written), "r"(writers - 1) : "memory");
#else
            before = atomicInc(reinterpret_cast<unsigned*>(written), writers - 1);
#endif
        }
        if (__shfl_sync(0xffffffffu, before, 0, 32) != writers - 1) return;
        __syncwarp(0xffffffffu);
    }
    unsigned long long* const ready = written + LINE * (1 + threadIdx.x);
#ifdef __CUDA_ARCH__
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(ready), "l"(launch) : "memory");
#else
    *ready = launch;
#endif
}

#ifdef __CUDA_ARCH__
DEVICE void await_zeros(const unsigned long long* ready, unsigned long long launch) {
    unsigned long long seen;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(ready) : "memory");
    while (seen != launch);
}
#endif
//// cut_rows
// Rows that runs of edges in the order of their receivers do not store: a run stores the rows whose edges it has all. A
// row with edges in several runs is cut: zeros are written to it, and each of these runs adds to it. A row without edges
// gets zeros alone.

// Whether the edges at two places of the order have one receiver. perm: the order, or null for that in memory.
DEVICE bool is_one_row(const index_t* receiver, const int* perm, int a, int b) {
    return receiver[perm ? perm[a] : a] == receiver[perm ? perm[b] : b];
}

// A block's share of the rows without edges and of the cut ones, with runs of `each` edges. Each lane looks at a row, then
// its warp writes those of its lanes, one after the other. Rows go to the warps in turn: the longest come first.
template <int WIDTH>
DEVICE void zero_cut_rows(Real* out, int elements, const int* spans, long long rows, int each, int writers) {
    const Real zeros[WIDTH] = {};
    const int lane = threadIdx.x % 32, warps = writers * (int(blockDim.x) / 32);
    const int warp = blockIdx.x * (int(blockDim.x) / 32) + int(threadIdx.x) / 32;
#pragma unroll 1
    for (long long first = warp; first < rows; first += 32ll * warps) {
        const long long mine = first + (long long)lane * warps;
        int row = -1;
        if (mine < rows) {
            const int begin = spans[3 * mine + 1], end = spans[3 * mine + 2];
            if (begin == end || begin / each != (end - 1) / each) row = spans[3 * mine];
        }
#pragma unroll 1
        for (int l = 0; l < 32; ++l) {
            const long long zeroed = __shfl_sync(0xffffffffu, row, l, 32);
            if (zeroed < 0) continue;
            for (int i = lane * WIDTH; i < elements; i += 32 * WIDTH) store<WIDTH>(out + zeroed * elements + i, zeros);
        }
    }
}
//// prefetch_inputs
// Asks the L2 cache for a whole array (or none, if it is null): a line a thread of the grid in most cases, without a loop.
template <class T>
DEVICE void ask_along(const T* p, long long count) {
#ifdef __CUDA_ARCH__
    const unsigned bytes = p ? unsigned(min(count * (long long)sizeof(T), 0xffffffffll)) : 0;
    const unsigned at = 128 * (blockIdx.x * blockDim.x + threadIdx.x);
    const unsigned long long from = __cvta_generic_to_global(p);
    if (at < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    const unsigned long long step = 128ull * gridDim.x * blockDim.x;
    if (step < bytes)
#pragma unroll 1
        for (unsigned long long i = at + step; i < bytes; i += step) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
#endif
}
//// row_writes
// Writes a block of a row in the order of memory. The lanes of a team leave their channels in shared memory (at `left`,
// STEP elements an access), and each takes WIDTH consecutive elements at a time, so that a team's accesses fill whole
// sectors in both layouts.
template <class How, int STEP, int WIDTH, int MUL, int DIM, int C>
DEVICE void put_rows(const Team& team, Real* left, Real* block, int first_channel, const Real (&r)[DIM][C]) {
    constexpr int TILE = LANES * C;
    team.sync();  // the block before has been taken
    if (MUL_IR) {
        Real flat[DIM * C];
        UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) flat[c * DIM + m] = r[m][c];
        store<STEP>(left + team.lane * (DIM * C), flat);
    } else {
        UNROLL for (int m = 0; m < DIM; ++m) store<STEP>(left + m * TILE + team.lane * C, r[m]);
    }
    team.sync();
    UNROLL for (int i = 0; i < DIM * TILE; i += LANES * WIDTH) {
        const int at = i + team.lane * WIDTH;
        const int channel = first_channel + (MUL_IR ? at / DIM : at % TILE);
        if (at < DIM * TILE && (MUL % TILE == 0 || channel < MUL)) {
            Real taken[WIDTH];
            load<WIDTH>(left + at, taken);
            How::template put<WIDTH>(block + (MUL_IR ? first_channel * DIM + at : at / TILE * MUL + channel), taken);
        }
    }
}
