// The hand-written part of a kernel of pairs: a team works through one edge, all it needs in its scratch memory.
// The emitter defines before it: Real, MUL_IR (layout of feature rows), LANES (of a team) and, for a GPU, ON_GPU. A team
// is a warp there, or a part of one, and a thread on the host.
#ifdef ON_GPU
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define SOME_ROWS _Pragma("unroll 4")

struct Team {
    int lane;
    // Teams of a warp keep in step (a mask of lanes known only at run time costs five instructions an exchange), so one
    // that has no edge left works on another's and writes nothing.
    bool active;
    DEVICE void sync() const { __syncwarp(0xffffffffu); }
    DEVICE Real from(Real value, int other) const { return __shfl_sync(0xffffffffu, value, other, LANES); }
    DEVICE Real sum(Real value) const {
        UNROLL for (int bit = LANES / 2; bit > 0; bit /= 2) value += __shfl_xor_sync(0xffffffffu, value, bit);
        return value;
    }
};
// One element from memory to the scratch memory, not waited for; and until a team's are all there, for all its lanes.
DEVICE void fetch(Real* scratch, const Real* from) {
#ifdef __CUDA_ARCH__
    const unsigned to = unsigned(__cvta_generic_to_shared(scratch));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(sizeof(Real))
                 : "memory");
#else
    *scratch = *from;
#endif
}
DEVICE void await_fetched(const Team& team) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    team.sync();
}
DEVICE void add_to(Real* p, Real value) { atomicAdd(p, value); }
DEVICE void add_shared(Real* p, Real value) { atomicAdd(p, value); }
#else
#define DEVICE static inline
#define UNROLL
#define SOME_ROWS

struct Team {
    static constexpr int lane = 0;
    static constexpr bool active = true;
    void sync() const {}
    Real from(Real value, int) const { return value; }
    Real sum(Real value) const { return value; }
};
static inline void add_to(Real* p, Real value) { *p += value; }  // a thread's own sums
static inline void add_shared(Real* p, Real value) {
#pragma omp atomic
    *p += value;
}
static inline int min(int a, int b) { return a < b ? a : b; }
#endif
#define EACH(i, count) for (int i = team.lane; i < (count); i += LANES)

// One irreps block (DIM components of MUL copies) from a feature row to scratch, where copies lie together, and back.
template <int DIM, int MUL>
DEVICE void load_block(const Team& team, const Real* row, Real* to) {
    EACH(i, DIM * MUL) to[MUL_IR ? i % DIM * MUL + i / DIM : i] = row[i];
}
template <int DIM, int MUL>
DEVICE void store_block(const Team& team, const Real* from, Real* row) {
    if (team.active) EACH(i, DIM * MUL) row[i] = from[MUL_IR ? i % DIM * MUL + i / DIM : i];
}
// Sums of an edge to the row of a node, to which other teams add as well.
template <int DIM, int MUL>
DEVICE void add_block(const Team& team, const Real* from, Real* row) {
    if (team.active) EACH(i, DIM * MUL) add_shared(row + i, from[MUL_IR ? i % DIM * MUL + i / DIM : i]);
}
template <int N>
DEVICE void load_row(const Team& team, const Real* from, Real* to) {
    EACH(i, N) to[i] = from[i];
}
template <int N>
DEVICE void add_row(const Team& team, const Real* from, Real* to) {
    if (team.active) EACH(i, N) add_shared(to + i, from[i]);
}
template <int N>
DEVICE void store_row(const Team& team, const Real* from, Real* to) {
    if (team.active) EACH(i, N) to[i] = from[i];
}
template <int N>
DEVICE void clear_row(const Team& team, Real* row) {
    EACH(i, N) row[i] = Real(0);
}

// Adds the products of a row of weights with M rows of cotangents, STRIDE elements from each other.
template <int M, int STRIDE>
DEVICE void meet(const Real* weights, const Real* g, int count, Real (&flow)[M]) {
#ifdef ON_GPU
    for (int n = 0; n < count; ++n) UNROLL for (int m = 0; m < M; ++m) flow[m] += weights[n] * g[m * STRIDE + n];
#else
    for (int m = 0; m < M; ++m) {
        Real total = 0;
#pragma omp simd reduction(+ : total)
        for (int n = 0; n < count; ++n) total += weights[n] * g[m * STRIDE + n];
        flow[m] += total;
    }
#endif
}

// The sum over the ROWS groups of COLS lanes that share a column, in the first of them.
template <int ROWS, int COLS>
DEVICE Real sum_rows(const Team& team, Real value) {
    Real total = value;
    UNROLL for (int r = 1; r < ROWS; ++r) total += team.from(value, (team.lane + r * COLS) % LANES);
    return total;
}
