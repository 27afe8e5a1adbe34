// Products of tensor cores, with edge weights as they fall: mma.sync.m16n8k16 of halves, sums in float32 (sm_80 on). A
// lane has group = lane / 4 and quad = lane % 4.
// Rows of channels: rows of a product are 16 channels of a path, columns 8 edges. A lane gets channels 2 group and
// 2 group + 1 of edges 2 quad and 2 quad + 1: (row r, column e) are {r0 e0, r0 e1, r1 e0, r1 e1}. So row r of the
// matrix in shared memory is channel 2 (r % 8) + r / 8. Rows of edges: see form_edge_weights; row r is channel r.
// Column p of each 16 of the matrix is the hidden feature 2 (p % 8) + p / 8. The emitter defines before: HIDDEN, STEPS
// (of 16 hidden features), ROW (halves of a row in shared memory), EDGE_ROWS, LOW (whether there are low parts,
// LOW_PART halves after the high ones).
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
// An 8 x 8 matrix of halves over the warp, transposed.
DEVICE unsigned transposed(unsigned both) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(both));
    return result;
}
#endif

// The largest magnitude of one path's 16 channels; `inside` is how many of them there are.
DEVICE unsigned largest_of_path(const Real* matrix, int weights, int inside) {
    unsigned largest = 0;
    for (int i = threadIdx.x; i < HIDDEN * 16; i += THREADS)
        if (i % 16 < inside) largest = max(largest, magnitude(matrix[(long long)(i / 16) * weights + i % 16]));
    return largest;
}

// One path's 16 channels in shared memory, scaled and split; zero beyond `inside` and HIDDEN.
DEVICE void pack_path(const Real* matrix, int weights, int inside, Real scale, unsigned short* path) {
    for (int i = threadIdx.x; i < STEPS * 16 * 16; i += THREADS) {
        const int channel = i % 16, k = i / 16;
        const bool is_there = channel < inside && k < HIDDEN;
        const Real value = is_there ? matrix[(long long)k * weights + channel] * scale : Real(0);
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

// An edge's hidden features as the right operand of a product, for the edge number `group`; returns its scale back.
DEVICE Real load_hidden(const Real* row, const Warp& warp, unsigned (&hi)[STEPS][2], unsigned (&lo)[STEPS][2]) {
    Real v[STEPS][4];
    unsigned largest = 0;
    UNROLL for (int s = 0; s < STEPS; ++s) {
        const int k = 16 * s + 4 * warp.quad;
        if (HIDDEN % 16 == 0 || k < HIDDEN) {
            load<4>(row + k, v[s]);
        } else {
            UNROLL for (int q = 0; q < 4; ++q) v[s][q] = Real(0);
        }
        UNROLL for (int q = 0; q < 4; ++q) largest = max(largest, magnitude(v[s][q]));
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const Scale scale = scale_of(largest);
    UNROLL for (int s = 0; s < STEPS; ++s) {
        split(v[s][0] * scale.into, v[s][2] * scale.into, hi[s][0], lo[s][0]);
        split(v[s][1] * scale.into, v[s][3] * scale.into, hi[s][1], lo[s][1]);
    }
    return scale.back;
}

// A path's weights of T tiles of edges, without their scales. Small parts have a sum of their own.
template <int T>
DEVICE void form_weights(const Warp& warp, int path, const unsigned (&hi)[T][STEPS][2], const unsigned (&lo)[T][STEPS][2],
                         Real (&w)[T][4]) {
    Real small[T][4];
    UNROLL for (int n = 0; n < T; ++n) UNROLL for (int i = 0; i < 4; ++i) w[n][i] = small[n][i] = Real(0);
    const unsigned short* const row = warp.slice + path + (warp.lane % 16) * ROW + warp.lane / 16 * 8;
    UNROLL for (int s = 0; s < STEPS; ++s) {
        unsigned a[4];
        load_matrix<false>(row + 16 * s, a);
        UNROLL for (int n = 0; n < T; ++n) multiply_add(w[n], a, hi[n][s]);
        if (LOW) {
            UNROLL for (int n = 0; n < T; ++n) multiply_add(small[n], a, lo[n][s]);
            load_matrix<false>(row + LOW_PART + 16 * s, a);
            UNROLL for (int n = 0; n < T; ++n) multiply_add(small[n], a, hi[n][s]);
        }
    }
    if (LOW) UNROLL for (int n = 0; n < T; ++n) UNROLL for (int i = 0; i < 4; ++i) w[n][i] += small[n][i];
}

// Adds to the gradient of hidden features what a path's gradients of weights give, times the matrix's scale. The chain of
// sums in the tensor cores ends here, after 16 channels: they truncate. The gradients are scaled by their largest.
template <int T>
DEVICE void add_to_hidden(const Warp& warp, int path, const Real (&gradient)[T][4], Real (&dh)[T][STEPS][4]) {
    const unsigned short* const row =
        warp.slice + path + (warp.lane % 8 + warp.lane / 16 * 8) * ROW + warp.lane / 8 % 2 * 8;
    unsigned hi[T][2], lo[T][2];
    Real back[T];
    UNROLL for (int n = 0; n < T; ++n) {
        unsigned largest = 0;
        UNROLL for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(gradient[n][i]));
        const Scale scale = scale_of(__reduce_max_sync(0xffffffffu, largest));
        back[n] = scale.back;
        UNROLL for (int r = 0; r < 2; ++r) {
            split(gradient[n][2 * r] * scale.into, gradient[n][2 * r + 1] * scale.into, hi[n][r], lo[n][r]);
            hi[n][r] = transposed(hi[n][r]);
            if (LOW) lo[n][r] = transposed(lo[n][r]);
        }
    }
    UNROLL for (int t = 0; t < STEPS; ++t) {
        unsigned a[4];
        Real d[T][4];
        load_matrix<true>(row + 16 * t, a);
        UNROLL for (int n = 0; n < T; ++n) {
            UNROLL for (int i = 0; i < 4; ++i) d[n][i] = Real(0);
            if (LOW) multiply_add(d[n], a, lo[n]);
            multiply_add(d[n], a, hi[n]);
        }
        if (LOW) {
            load_matrix<true>(row + LOW_PART + 16 * t, a);
            UNROLL for (int n = 0; n < T; ++n) multiply_add(d[n], a, hi[n]);
        }
        UNROLL for (int n = 0; n < T; ++n) UNROLL for (int i = 0; i < 4; ++i) dh[n][t][i] += d[n][i] * back[n];
    }
}

// Adds (or stores) the lane's gradients of hidden features, of column i (0 or 1) of a tile, to the row of that edge.
template <class How>
DEVICE void put_hidden(Real* row, const Warp& warp, int i, const Real (&dh)[STEPS][4], Real scale) {
    UNROLL for (int t = 0; t < STEPS; ++t) {
        const int k = 16 * t + 2 * warp.group;
        Real two[2] = {dh[t][i] * scale, dh[t][2 + i] * scale};
        if (HIDDEN % 16 == 0 || k < HIDDEN) How::template put<2>(row + k, two);
    }
}

// Leaves a node's block of 16 channels in shared memory, by component; lanes with the same channels share them.
template <int MUL, int DIM>
DEVICE void stage_block(const Real* block, int u, bool active, const Warp& warp, Real* left) {
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
        }
    }
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
    Real small[2][4];
    UNROLL for (int i = 0; i < 4; ++i) w[i] = small[0][i] = small[1][i] = Real(0);
    UNROLL for (int s = 0; s < STEPS; s += LOW ? 1 : 2) {
        unsigned b[4];
        load_matrix<false>(row + 16 * s, b);
        const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        const unsigned a[4] = {hi[0][s][0], hi[1][s][0], hi[0][s][1], hi[1][s][1]};
        multiply_add(w, a, first);
        if (LOW) {
            const unsigned rest[4] = {lo[0][s][0], lo[1][s][0], lo[0][s][1], lo[1][s][1]};
            multiply_add(small[0], rest, first);
            multiply_add(small[1], a, second);
        } else if (s + 1 < STEPS) {
            const int t = s + 1 < STEPS ? s + 1 : s;
            const unsigned next[4] = {hi[0][t][0], hi[1][t][0], hi[0][t][1], hi[1][t][1]};
            multiply_add(w, next, second);
        }
    }
    if (LOW) UNROLL for (int i = 0; i < 4; ++i) w[i] += small[0][i] + small[1][i];
}

// Adds to the gradients of hidden features what two paths' gradients of weights give; the second path's part of the
// matrix is `apart` halves behind the first one's. Chains end after 16 sums; each edge's are scaled by their largest.
DEVICE void add_edges_to_hidden(const Warp& warp, int path, int apart, const Real (&gradient)[2][4],
                                Real (&dh)[2][STEPS][4]) {
    const unsigned short* const row =
        warp.slice + path + warp.lane / 8 % 2 * apart + warp.lane % 8 * ROW + warp.lane / 16 * 8;
    unsigned hi[4], lo[4];
    Real back[2];
    UNROLL for (int i = 0; i < 2; ++i) {
        unsigned largest = 0;
        UNROLL for (int k = 0; k < 4; ++k) largest = max(largest, magnitude(gradient[k / 2][2 * i + k % 2]));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const Scale scale = scale_of(largest);
        back[i] = scale.back;
        UNROLL for (int k = 0; k < 2; ++k)
            split(gradient[k][2 * i] * scale.into, gradient[k][2 * i + 1] * scale.into, hi[i + 2 * k], lo[i + 2 * k]);
    }
    UNROLL for (int s = 0; s < STEPS; ++s) {
        unsigned b[4];
        Real d[2][4];
        load_matrix<true>(row + 16 * s, b);
        UNROLL for (int n = 0; n < 2; ++n) {
            const unsigned column[2] = {b[2 * n], b[2 * n + 1]};
            UNROLL for (int i = 0; i < 4; ++i) d[n][i] = Real(0);
            if (LOW) multiply_add(d[n], lo, column);
            multiply_add(d[n], hi, column);
        }
        if (LOW) {
            load_matrix<true>(row + LOW_PART + 16 * s, b);
            UNROLL for (int n = 0; n < 2; ++n) {
                const unsigned column[2] = {b[2 * n], b[2 * n + 1]};
                multiply_add(d[n], hi, column);
            }
        }
        UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int q = 0; q < 4; ++q)
            dh[i][s][q] += d[q % 2][2 * i + q / 2] * back[i];
    }
}

// Adds the lane's gradients of an edge's hidden features to its row.
template <class How>
DEVICE void put_edge_hidden(Real* row, const Warp& warp, const Real (&dh)[STEPS][4], Real scale) {
    UNROLL for (int s = 0; s < STEPS; ++s) {
        const int k = 16 * s + 4 * warp.quad;
        Real four[4] = {dh[s][0] * scale, dh[s][1] * scale, dh[s][2] * scale, dh[s][3] * scale};
        if (HIDDEN % 16 == 0 || k < HIDDEN) How::template put<4>(row + k, four);
    }
}

// Sums a node's block over the lanes with the same channels, which took different edges; each lane writes a part.
template <class How, int MUL, int DIM>
DEVICE void put_sums(Real* block, int u, bool active, const Warp& warp, const Real (&r)[DIM][C]) {
    const bool upper = (warp.quad & 2) != 0;
    UNROLL for (int m = 0; m < DIM; ++m) {
        const Real pass = upper ? r[m][0] : r[m][1], keep = upper ? r[m][1] : r[m][0];
        Real sum[1] = {keep + __shfl_xor_sync(0xffffffffu, pass, 2)};
        sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], 1);
        const int v = u + (upper ? 1 : 0);
        if (active && (warp.quad & 1) == m % 2) How::template put<1>(block + (MUL_IR ? v * DIM + m : m * MUL + v), sum);
    }
}

// Sums N values over the lanes with the same edges, which have different channels, by recursive halving, and adds (or
// stores) them to a row, WIDTH at a time: see sum_over_team. These are COUNT lanes, STEP from each other.
template <class How, int STEP, int COUNT, int WIDTH, int N>
DEVICE void sum_over_channels(const Warp& warp, Real (&v)[N], bool active, Real* row) {
    int held = N, first = 0, end = N;
    bool writes = active;
    UNROLL for (int bit = STEP * COUNT / 2; bit >= STEP; bit /= 2) {
        const bool upper = (warp.lane & bit) != 0;
        if (held > 1) {
            const int half = (held + 1) / 2;
            UNROLL for (int i = 0; i < (N + 1) / 2; ++i) {
                if (i < half) {
                    const Real high = i + half < held ? v[i + half] : Real(0);
                    const Real pass = upper ? v[i] : high, keep = upper ? high : v[i];
                    v[i] = keep + __shfl_xor_sync(0xffffffffu, pass, bit);
                }
            }
            end = upper ? end : min(end, first + half);
            first += upper ? half : 0;
            held = half;
        } else {
            v[0] += __shfl_xor_sync(0xffffffffu, v[0], bit);
            writes = writes && !upper;
        }
    }
    static_assert(WIDTH == 1 || N % (COUNT * WIDTH) == 0, "equal parts of whole accesses");
    UNROLL for (int i = 0; i < (N + COUNT - 1) / COUNT; i += WIDTH) {
        Real some[WIDTH];
        UNROLL for (int k = 0; k < WIDTH; ++k) some[k] = v[i + k];
        if (writes && i < held && first + i < end) How::template put<WIDTH>(row + first + i, some);
    }
}
