// Receivers' rows in kernels of values: a share of the edges stores the rows whose edges it has all. A row that the end of
// a share cuts has a mark of each part, which is zero before: the first share there stores its sums, the others wait for
// that and add theirs. Who stores waits for none, so nobody waits for a share that has not begun.

enum : unsigned { NOBODY = 0, BEGUN = 1, STORED = 2 };  // of a mark
#ifdef __CUDA_ARCH__
DEVICE unsigned begin_row(unsigned* mark) {
    unsigned before;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(mark) : "memory");
    return before;
}
DEVICE unsigned look_at(const unsigned* mark) {
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(mark) : "memory");
    return seen;
}
DEVICE void tell(unsigned* mark) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(mark), "r"(2) : "memory"); }
#else
DEVICE unsigned begin_row(unsigned* mark) {
    const unsigned before = *mark;
    if (before == NOBODY) *mark = BEGUN;
    return before;
}
DEVICE unsigned look_at(const unsigned* mark) { return *mark; }
DEVICE void tell(unsigned* mark) { *mark = STORED; }
#endif

// Whether a warp is the first of those that have edges of a cut row; then it stores and calls `end_row`. If not, what the
// first one stored is there when this returns. The same for all lanes.
DEVICE bool is_first_of_row(const Warp& warp, unsigned* mark) {
    int seen = warp.lane == 0 ? int(begin_row(mark)) : 0;
    seen = warp.broadcast(seen, 0);
    if (seen == NOBODY) return true;
    while (seen != STORED) {
        if (warp.lane == 0) seen = int(look_at(mark));
        seen = warp.broadcast(seen, 0);
    }
    __syncwarp(0xffffffffu);
    return false;
}
DEVICE void end_row(const Warp& warp, unsigned* mark) {
    __syncwarp(0xffffffffu);
    if (warp.lane == 0) tell(mark);
}

// As `put_sums`; stores what it does not add.
template <int MUL, int DIM>
DEVICE void put_row(bool adds, Real* block, int u, bool active, const Warp& warp, const Real (&r)[DIM][C]) {
    const int v = u + warp.quad / 2;
    UNROLL for (int m = 0; m < DIM; ++m) {
        const Real sum[1] = {sum_of_channel(warp, r[m])};
        Real* const place = block + (MUL_IR ? v * DIM + m : m * MUL + v);
        if (active && (warp.quad & 1) == m % 2) {
            if (adds) add<1>(place, sum); else store<1>(place, sum);
        }
    }
}

// The node of a run without edges; -1 for other runs, and if there is no such run.
DEVICE int node_without_edges(const int* spans, int count, int run) {
    return run < count && spans[3 * run + 1] == spans[3 * run + 2] ? spans[3 * run] : -1;
}
// Zeros for the lane's channels of a node's block.
template <int MUL, int DIM>
DEVICE void put_zeros(Real* block, int u, bool active, const Warp& warp) {
    const Real zeros[C] = {};
#pragma unroll 1
    for (int m = warp.quad; m < DIM && active; m += 4) {
        if (MUL_IR) {
            UNROLL for (int c = 0; c < C; ++c) block[(u + c) * DIM + m] = Real(0);
        } else {
            store<C>(block + m * MUL + u, zeros);
        }
    }
}
