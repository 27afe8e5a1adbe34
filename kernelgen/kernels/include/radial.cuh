// Radial convolutions whose weights a kernel multiplies itself.
// A kernel includes sections; one that speaks of NAME.cuh means the section NAME.
//// products
// Products of tensor cores, with edge weights as they fall: mma.sync.m16n8k16 of halves, sums in float32 (sm_80 on). A
// lane has group = lane / 4 and quad = lane % 4.
// Rows of channels: rows of a product are 16 channels of a path, columns 8 edges. A lane gets channels 2 group and
// 2 group + 1 of edges 2 quad and 2 quad + 1: (row r, column e) are {r0 e0, r0 e1, r1 e0, r1 e1}. So row r of the
// matrix in shared memory is channel 2 (r % 8) + r / 8. Rows of edges: see form_edge_weights; row r is channel r.
// Column p of each 16 of the matrix is the hidden feature 2 (p % 8) + p / 8. The emitter defines before: HIDDEN, STEPS
// (of 16 hidden features), ROW (halves of a row in shared memory), EDGE_ROWS, LOW (whether there are low parts,
// LOW_PART halves after the high ones), CHANNELS (of a path's part of the matrix: 16, or 64 of four warps).
struct Warp {
    int lane, group, quad;
    const unsigned short* slice;  // of the matrix: the lane's row for load_matrix
    DEVICE int broadcast(int value, int from) const { return __shfl_sync(0xffffffffu, value, from, 32); }
};

#ifdef __CUDA_ARCH__
// Four matrices of 8 x 8 halves, each lane with the address of a row; a lane gets two neighbours of a row (a column).
template <bool TRANSPOSED>
DEVICE void load_matrix(const unsigned short* row, unsigned (&r)[4]) {
    const unsigned at = unsigned(__cvta_generic_to_shared(row));
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
#endif

// For magnitudes below 2^(bound - 126); any bound.
DEVICE Scale scale_of_bound(int bound) {
    const int exponent = min(max(268 - bound, 1), 253);
    return {real_of(unsigned(exponent) << 23), real_of(unsigned(254 - exponent) << 23)};
}
// The number e for which a magnitude is below 2^(e - 126).
DEVICE int bound_of(unsigned largest) { return int(largest >> 23); }

// The largest magnitude of one path's channels times its factor; `inside` is how many channels there are.
DEVICE unsigned largest_of_path(const Real* matrix, int weights, int inside, Real factor) {
    unsigned largest = 0;
    for (int i = threadIdx.x; i < HIDDEN * CHANNELS; i += THREADS) {
        const long long at = (long long)(i / CHANNELS) * weights + i % CHANNELS;
        if (i % CHANNELS < inside) largest = max(largest, magnitude(matrix[at] * factor));
    }
    return largest;
}

// One path's 16 channels times its factor in shared memory, scaled and split; zero beyond `inside` and HIDDEN.
DEVICE void pack_path(const Real* matrix, int weights, int inside, Real factor, Real scale, unsigned short* path) {
    for (int i = threadIdx.x; i < STEPS * 16 * 16; i += THREADS) {
        const int channel = i % 16, k = i / 16;
        const bool is_there = channel < inside && k < HIDDEN;
        const Real value = is_there ? matrix[(long long)k * weights + channel] * factor * scale : Real(0);
        const int row = EDGE_ROWS ? channel : channel / 2 + 8 * (channel % 2);
        const int place = row * ROW + k / 16 * 16 + k % 16 / 2 + 8 * (k % 2);
        unsigned hi, lo;
        split(value, Real(0), hi, lo);
        path[place] = (unsigned short)(hi & 0xffffu);
        if (LOW) path[LOW_PART + place] = (unsigned short)(lo & 0xffffu);
    }
}

// The maximum over the block; `shared` has room for one value a warp.
DEVICE unsigned largest_of_block(unsigned value, unsigned* shared) {
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
    __syncthreads();
    unsigned largest = 0;
    for (int i = 0; i < THREADS / 32; ++i) largest = max(largest, shared[i]);
    __syncthreads();
    return largest;
}

// The lane's hidden features of an edge.
DEVICE void fetch_hidden(const Real* row, const Warp& warp, Real (&v)[STEPS][4]) {
    UNROLL for (int s = 0; s < STEPS; ++s) {
        const int k = 16 * s + 4 * warp.quad;
        if (HIDDEN % 16 == 0 || k < HIDDEN) {
            load<4>(row + k, v[s]);
        } else {
            UNROLL for (int q = 0; q < 4; ++q) v[s][q] = Real(0);
        }
    }
}
// Such features as the right operand of a product, for the edge number `group`; returns its scale back.
DEVICE Real split_hidden(const Real (&v)[STEPS][4], unsigned (&hi)[STEPS][2], unsigned (&lo)[STEPS][2]) {
    unsigned largest = 0;
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int q = 0; q < 4; ++q) largest = max(largest, magnitude(v[s][q]));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const Scale scale = scale_of(largest);
    UNROLL for (int s = 0; s < STEPS; ++s) {
        split(v[s][0] * scale.into, v[s][2] * scale.into, hi[s][0], lo[s][0]);
        split(v[s][1] * scale.into, v[s][3] * scale.into, hi[s][1], lo[s][1]);
    }
    return scale.back;
}
DEVICE Real load_hidden(const Real* row, const Warp& warp, unsigned (&hi)[STEPS][2], unsigned (&lo)[STEPS][2]) {
    Real v[STEPS][4];
    fetch_hidden(row, warp, v);
    return split_hidden(v, hi, lo);
}

// A path's weights of T tiles of edges, without their scales. Of each step the small products are added first.
template <int T>
DEVICE void form_weights(const Warp& warp, int path, const unsigned (&hi)[T][STEPS][2], const unsigned (&lo)[T][STEPS][2],
                         Real (&w)[T][4]) {
    UNROLL for (int n = 0; n < T; ++n) UNROLL for (int i = 0; i < 4; ++i) w[n][i] = Real(0);
    const unsigned short* const row = warp.slice + path + (warp.lane % 16) * ROW + warp.lane / 16 * 8;
    UNROLL for (int s = 0; s < STEPS; ++s) {
        unsigned a[4], small[4];
        load_matrix<false>(row + 16 * s, a);
        if (LOW) {
            load_matrix<false>(row + LOW_PART + 16 * s, small);
            UNROLL for (int n = 0; n < T; ++n) multiply_add(w[n], small, hi[n][s]);
            UNROLL for (int n = 0; n < T; ++n) multiply_add(w[n], a, lo[n][s]);
        }
        UNROLL for (int n = 0; n < T; ++n) multiply_add(w[n], a, hi[n][s]);
    }
}

// Leaves a node's block of 16 channels in shared memory, by component; lanes with the same channels share them. Returns
// the largest magnitude of what the lane left.
template <int MUL, int DIM>
DEVICE unsigned stage_block(const Real* block, int u, bool active, const Warp& warp, Real* left) {
    unsigned largest = 0;
    UNROLL for (int first = 0; first < DIM; first += 4) {
        const int m = first + warp.quad;
        if (m < DIM) {
            Real two[C] = {};
            if (active && MUL_IR) {
                UNROLL for (int c = 0; c < C; ++c) two[c] = block[(u + c) * DIM + m];
            } else if (active) {
                load<C>(block + m * MUL + u, two);
            }
            store<C>(left + m * 16 + 2 * warp.group, two);
            largest = max(largest, max(magnitude(two[0]), magnitude(two[1])));
        }
    }
    return largest;
}
// A lane's channels of such a block.
template <int DIM>
DEVICE void take_block(const Real* left, Real (&r)[DIM][C]) {
    UNROLL for (int m = 0; m < DIM; ++m) load<C>(left + m * 16, r[m]);
}

// Rows of edges: a path's weights of 16 edges and 8 channels, {edge g: c0 c1, edge g + 8: c0 c1}. One load has the high
// and low parts of a step, or two steps.
DEVICE void form_edge_weights(const Warp& warp, int path, const unsigned (&hi)[2][STEPS][2],
                              const unsigned (&lo)[2][STEPS][2], Real (&w)[4]) {
    constexpr int MORE = LOW ? LOW_PART : 16;
    const unsigned short* const row =
        warp.slice + path + warp.lane % 8 * ROW + warp.lane / 8 % 2 * 8 + warp.lane / 16 * MORE;
    Real sums[2][4] = {};  // two chains of sums, small parts first
    unsigned b[STEPS][4];
    UNROLL for (int s = 0; s < STEPS; s += LOW ? 1 : 2) {
        load_matrix<false>(row + 16 * s, b[s]);
        if (LOW) {
            multiply_add(sums[0], {lo[0][s][0], lo[1][s][0], lo[0][s][1], lo[1][s][1]}, {b[s][0], b[s][1]});
            multiply_add(sums[1], {hi[0][s][0], hi[1][s][0], hi[0][s][1], hi[1][s][1]}, {b[s][2], b[s][3]});
        }
    }
    UNROLL for (int s = 0; s < STEPS; ++s) {
        const int of = LOW ? s : s / 2 * 2, part = LOW ? 0 : 2 * (s % 2);
        multiply_add(sums[s % 2], {hi[0][s][0], hi[1][s][0], hi[0][s][1], hi[1][s][1]}, {b[of][part], b[of][part + 1]});
    }
    UNROLL for (int i = 0; i < 4; ++i) w[i] = sums[0][i] + sums[1][i];
}

// The largest magnitude of some values.
template <int N>
DEVICE unsigned largest_of(const Real (&r)[N]) {
    unsigned largest = 0;
    UNROLL for (int k = 0; k < N; ++k) largest = max(largest, magnitude(r[k]));
    return largest;
}
template <int N>
DEVICE unsigned largest_of(const Real (&r)[N][C]) {
    unsigned largest = 0;
    UNROLL for (int k = 0; k < N; ++k) largest = max(largest, largest_of(r[k]));
    return largest;
}
// The scale of an edge's gradients of weights, of the 8 channels of a quad and all paths: these are at most products of
// an element of x, an edge value, a cotangent and a number. `bound` is that of the latter three; `largest` of x.
DEVICE Scale scale_of_quad(int bound, unsigned largest) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return scale_of_bound(bound + bound_of(largest));
}

// Two paths' gradients of weights as the left operand of a product.
DEVICE void split_gradients(const Real (&gradient)[2][4], const Scale (&scale)[2], unsigned (&hi)[4], unsigned (&lo)[4]) {
    UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int k = 0; k < 2; ++k)
        split(gradient[k][2 * i] * scale[i].into, gradient[k][2 * i + 1] * scale[i].into, hi[i + 2 * k], lo[i + 2 * k]);
}

// Adds to the gradients of hidden features what gradients of weights of 2 PAIRS paths give (the last path may be missing;
// its gradients are zeros). Tensor cores truncate sums: small ones come first, and after four paths the chain ends.
template <int PAIRS, bool IS_EVEN>
DEVICE void add_to_hidden(const Warp& warp, int path, const unsigned (&hi)[2][4], const unsigned (&lo)[2][4],
                          const Scale (&scale)[2], Real (&dh)[2][STEPS][4]) {
    const unsigned short* const row = warp.slice + path + warp.lane % 8 * ROW + warp.lane / 16 * 8;
    const bool second = warp.lane / 8 % 2 != 0;
    UNROLL for (int s = 0; s < STEPS; ++s) {
        Real d[2][4] = {};
        unsigned b[PAIRS][4];
        UNROLL for (int n = 0; n < PAIRS; ++n) {
            load_matrix<true>(row + (2 * n + (second && (IS_EVEN || n + 1 < PAIRS))) * PATH + 16 * s, b[n]);
            UNROLL for (int k = 0; k < 2; ++k)
                if (LOW) multiply_add(d[k], lo[n], {b[n][2 * k], b[n][2 * k + 1]});
        }
        UNROLL for (int n = 0; n < PAIRS; ++n) {
            unsigned c[4];
            if (LOW) load_matrix<true>(row + (2 * n + (second && (IS_EVEN || n + 1 < PAIRS))) * PATH + LOW_PART + 16 * s, c);
            UNROLL for (int k = 0; k < 2; ++k)
                if (LOW) multiply_add(d[k], hi[n], {c[2 * k], c[2 * k + 1]});
        }
        UNROLL for (int n = 0; n < PAIRS; ++n) UNROLL for (int k = 0; k < 2; ++k)
            multiply_add(d[k], hi[n], {b[n][2 * k], b[n][2 * k + 1]});
        UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int q = 0; q < 4; ++q)
            dh[i][s][q] += d[q % 2][2 * i + q / 2] * scale[i].back;
    }
}

// Adds the lane's gradients of an edge's hidden features to its row.
DEVICE void put_hidden(Real* row, const Warp& warp, const Real (&dh)[STEPS][4], Real scale) {
    UNROLL for (int s = 0; s < STEPS; ++s) {
        const int k = 16 * s + 4 * warp.quad;
        Real four[4] = {dh[s][0] * scale, dh[s][1] * scale, dh[s][2] * scale, dh[s][3] * scale};
        if (HIDDEN % 16 == 0 || k < HIDDEN) add<4>(row + k, four);
    }
}

// The sum of a channel over the lanes of a quad, which took different edges: of the first one for its lower two lanes, of
// the second one for the others.
DEVICE Real sum_of_channel(const Warp& warp, const Real (&r)[C]) {
    const bool upper = (warp.quad & 2) != 0;
    const Real pass = upper ? r[0] : r[1], keep = upper ? r[1] : r[0];
    const Real sum = keep + __shfl_xor_sync(0xffffffffu, pass, 2);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

// Sums a node's block over the lanes with the same channels; each lane adds a part.
template <int MUL, int DIM>
DEVICE void put_sums(Real* block, int u, bool active, const Warp& warp, const Real (&r)[DIM][C]) {
    const int v = u + warp.quad / 2;
    UNROLL for (int m = 0; m < DIM; ++m) {
        const Real sum[1] = {sum_of_channel(warp, r[m])};
        if (active && (warp.quad & 1) == m % 2) add<1>(block + (MUL_IR ? v * DIM + m : m * MUL + v), sum);
    }
}

// Sums four values over the lanes of a quad, which have the same edges and different channels; each lane gets one.
DEVICE Real sum_to_quad(const Warp& warp, const Real* v) {
    const bool upper = (warp.lane & 2) != 0, odd = (warp.lane & 1) != 0;
    Real two[2];
    UNROLL for (int i = 0; i < 2; ++i) {
        const Real pass = upper ? v[i] : v[i + 2], keep = upper ? v[i + 2] : v[i];
        two[i] = keep + __shfl_xor_sync(0xffffffffu, pass, 2);
    }
    const Real pass = odd ? two[0] : two[1], keep = odd ? two[1] : two[0];
    return keep + __shfl_xor_sync(0xffffffffu, pass, 1);
}
//// shares
// How parts of the edges are divided equally. A part's work is that of its edges, 1 each, and of its receivers with edges:
// these add OF_RECEIVER each, which a kernel states for a path group. What is divided is places in this work.

// The first of the spans (node, first edge, end) that ends behind a place; spans are in the order of edges. The lanes of a
// warp look at 32 of them at a time. All of them call it.
template <int OF_RECEIVER>
DEVICE int run_at(const Warp& warp, const int* spans, int count, long long place) {
    int low = 0;  // the run is one of low .. count, where count stands for none
    while (low < count) {
        const int each = (count - low + 31) / 32, last = low + (warp.lane + 1) * each - 1;
        const bool is_before = last < count && spans[3 * last + 2] + (last + 1ll) * OF_RECEIVER <= place;
        low += __popc(__ballot_sync(0xffffffffu, is_before)) * each;
        count = min(count, low + each - 1);
    }
    return count;
}
// That of an edge.
DEVICE int run_of(const Warp& warp, const int* spans, int count, int edge) { return run_at<0>(warp, spans, count, edge); }

// The edge at a place of the work of some runs, of which the last one has edges. A receiver comes before its edges.
template <int OF_RECEIVER>
DEVICE int edge_at_work(const Warp& warp, const int* spans, int count, long long place) {
    const int run = run_at<OF_RECEIVER>(warp, spans, count, place);
    if (run == count) return spans[3 * count - 1];
    const int first = spans[3 * run + 1];
    return first + max(0, int(place - first - (run + 1ll) * OF_RECEIVER));
}

// A place in a part's work where one block ends and another begins. That is not so near to an end of the part that one of
// them would load the part's matrix for fewer than 8 edges a warp.
DEVICE long long work_until(long long place, long long work) {
    constexpr int FEW = THREADS / 4;
    if (place >= work) return work;
    return place < FEW ? 0 : place > work - FEW ? work : place;
}
// The places begin .. end - 1 that a block has in the work of a part. The works of all parts, times their costs, follow each
// other; the part's begins at `start` of `whole`.
struct Places {
    long long begin, end;
};
DEVICE Places places_of_block(long long whole, long long start, int cost, long long work) {
    const long long from = whole * blockIdx.x / gridDim.x, to = whole * (blockIdx.x + 1) / gridDim.x;
    return {work_until((from - start) / cost, work), work_until((to - start) / cost, work)};
}
// The same number, of which compilers do not know that: they compute anew what follows from it, and keep no registers.
DEVICE int unknown(int number) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(number));
#endif
    return number;
}
//// matrix_at_once
// A block's part of the matrix in one pass over memory: all loads are in flight at once, and wait in registers for the
// scale. A lane has pairs of a path's matrix, one channel of hidden features k and k + 2, which in shared memory are
// neighbours; lanes with the same k have the channels of one row.
constexpr int PAIRS = (STEPS * 8 * CHANNELS + THREADS - 1) / THREADS;  // of a path, of a lane

// The lane's pairs of a path's channels; zero beyond `inside` and HIDDEN. The first UNIQUE channels may be there again.
template <int UNIQUE = CHANNELS>
DEVICE void fetch_path(const Real* matrix, int weights, int inside, Real (&held)[PAIRS][2]) {
    UNROLL for (int n = 0; n < PAIRS; ++n) UNROLL for (int q = 0; q < 2; ++q) {
        const int i = threadIdx.x + n * THREADS, channel = i % UNIQUE, k = i / (2 * CHANNELS) * 4 + i / CHANNELS % 2 + 2 * q;
        held[n][q] = channel < inside && k < HIDDEN ? matrix[(long long)k * weights + channel] : Real(0);
    }
}
// What `fetch_path` left, times the path's factor; returns the largest magnitude.
DEVICE unsigned take_factor(Real (&held)[PAIRS][2], Real factor) {
    unsigned largest = 0;
    UNROLL for (int n = 0; n < PAIRS; ++n) UNROLL for (int q = 0; q < 2; ++q) {
        held[n][q] *= factor;
        largest = max(largest, magnitude(held[n][q]));
    }
    return largest;
}
// What `fetch_path` left, in shared memory, as by `pack_path`.
DEVICE void leave_path(const Real (&held)[PAIRS][2], Real scale, unsigned short* path) {
    UNROLL for (int n = 0; n < PAIRS; ++n) {
        const int i = threadIdx.x + n * THREADS, channel = i % 16, k = i / 32 * 4 + i / 16 % 2;
        const int row = EDGE_ROWS ? channel : channel / 2 + 8 * (channel % 2);
        unsigned* const place = reinterpret_cast<unsigned*>(path + row * ROW + k / 16 * 16 + k % 16 / 2 + 8 * (k % 2));
        unsigned hi, lo;
        split(held[n][0] * scale, held[n][1] * scale, hi, lo);
        if (STEPS * 128 % THREADS == 0 || i < STEPS * 128) {
            *place = hi;
            if (LOW) place[LOW_PART / 2] = lo;
        }
    }
}
//// whole_rows
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
