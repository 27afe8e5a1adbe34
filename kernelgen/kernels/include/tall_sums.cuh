// out [splits, left, right]: parts of a^T b, the sums over rows of a [rows, left] and b [rows, right]. A block has 64 of
// the left columns, 32 WARPS of the right ones, and every `splits`-th run of 64 rows. Each row of a is scaled, and its
// scale goes over to b's row; 16 rows of a column of b are scaled together. The chain of sums in the tensor cores ends
// after 16 rows: they truncate. Of 16 rows a lane has quad, quad + 4, quad + 8 and quad + 12, of 32 columns four
// neighbouring ones.
constexpr int RUN = 64, LEFT = 64, STRIDE = LEFT + 8;  // rows of different lanes lie in different banks

// Elements n .. n + 3 of a lane's rows of 16; beyond the end those of the last row, beyond the columns others.
DEVICE void load_rows(const Real* matrix, long long first, long long n, long long rows, long long columns, Real (&v)[4][4]) {
    UNROLL for (int e = 0; e < 4; ++e) load_four(matrix + min(first + 4 * e, rows - 1) * columns, n, columns, v[e]);
}

// Copies a run of a's rows to shared memory, without waiting.
DEVICE void fetch_run(Real* to, const Real* a, long long run, long long m, long long rows, long long left) {
    for (int i = threadIdx.x; i < RUN * LEFT / 4; i += 32 * WARPS) {
        const int row = i / (LEFT / 4), column = i % (LEFT / 4) * 4;
        fetch16(to + row * STRIDE + column, a + min(run + row, rows - 1) * left + (m + column < left ? m + column : 0));
    }
    end_fetch();
}

// A lane's elements of 16 rows of a as halves of left operands; `inside` of the rows are there.
DEVICE void put_rows(const Real* raw, int group, int quad, long long inside, uint4 (*parts)[2][32], Real* backs) {
    Real v[2][4][4], into[4];
    UNROLL for (int e = 0; e < 4; ++e) {
        const int row = quad + 4 * e;
        unsigned largest = 0;
        UNROLL for (int i = 0; i < 2; ++i) {
            load<4>(raw + row * STRIDE + 32 * i + 4 * group, v[i][e]);
            UNROLL for (int k = 0; k < 4; ++k) largest = max(largest, magnitude(v[i][e][k]));
        }
        UNROLL for (int bit = 4; bit < 32; bit *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, bit));
        const Scale scale = scale_of(largest);
        into[e] = row < inside ? scale.into : Real(0);
        if (group == 0) backs[row] = scale.back;
    }
    UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int j = 0; j < 2; ++j) {
        unsigned hi[4], lo[4];
        UNROLL for (int k = 0; k < 4; ++k) {
            const int e = k / 2 * 2, column = 2 * j + k % 2;
            split(v[i][e][column] * into[e], v[i][e + 1][column] * into[e + 1], hi[k], lo[k]);
        }
        parts[2 * i + j][0][threadIdx.x % 32] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        parts[2 * i + j][1][threadIdx.x % 32] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
}

// Three blocks share a multiprocessor, at the price of a few spilled registers.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) equitune_tall_sums(
    const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, long long rows, long long left,
    long long right, long long splits) {
    __shared__ uint4 parts[RUN / 16][4][2][32];
    __shared__ Pack<4> fetched[RUN * STRIDE / 4];
    __shared__ Real backs[RUN];
    Real* const raw = fetched[0].v;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const long long across = (right + 32 * WARPS - 1) / (32 * WARPS), of = blockIdx.x % splits;
    const long long n = (blockIdx.x / splits % across * WARPS + warp) * 32 + 4 * group;
    const long long m = blockIdx.x / splits / across * LEFT;
    Real sums[4][4][4] = {}, next[4][4];
    fetch_run(raw, a, of * RUN, m, rows, left);
    load_rows(b, of * RUN + quad, n, rows, right, next);
    for (long long run = of * RUN; run < rows; run += splits * RUN) {
        await_fetches<0>();
        __syncthreads();
        for (int s = warp; s < RUN / 16; s += WARPS)
            put_rows(raw + 16 * s * STRIDE, group, quad, rows - run - 16 * s, parts[s], backs + 16 * s);
        __syncthreads();
        fetch_run(raw, a, run + splits * RUN, m, rows, left);
        for (int s = 0; s < RUN / 16; ++s) {
            unsigned largest[4] = {}, hi[4][2], lo[4][2];
            Real back[4][2];
            UNROLL for (int e = 0; e < 4; ++e) {
                const Real of_row = backs[16 * s + quad + 4 * e];
                UNROLL for (int k = 0; k < 4; ++k) {
                    next[e][k] *= of_row;
                    largest[k] = max(largest[k], magnitude(next[e][k]));
                }
            }
            UNROLL for (int k = 0; k < 4; ++k) {
                const Scale scale = scale_of_row(largest[k]);
                UNROLL for (int e = 0; e < 2; ++e) {
                    split(next[2 * e][k] * scale.into, next[2 * e + 1][k] * scale.into, hi[k][e], lo[k][e]);
                    // A result's column is that of the lanes of group 2 quad + e.
                    back[k][e] = __shfl_sync(0xffffffffu, scale.back, 8 * quad + 4 * e, 32);
                }
            }
            const long long following = s + 1 < RUN / 16 ? run + 16 * (s + 1) : run + splits * RUN;
            load_rows(b, following + quad, n, rows, right, next);
            UNROLL for (int i = 0; i < 4; ++i) {
                const uint4 high = parts[s][i][0][lane], low = parts[s][i][1][lane];
                const unsigned of_high[4] = {high.x, high.y, high.z, high.w}, of_low[4] = {low.x, low.y, low.z, low.w};
                UNROLL for (int k = 0; k < 4; ++k) {
                    Real d[4] = {};
                    multiply_add(d, of_low, hi[k]);
                    multiply_add(d, of_high, lo[k]);
                    multiply_add(d, of_high, hi[k]);
                    UNROLL for (int q = 0; q < 4; ++q) sums[i][k][q] += d[q] * back[k][q % 2];
                }
            }
        }
    }
    UNROLL for (int i = 0; i < 4; ++i) UNROLL for (int half = 0; half < 2; ++half) {
        const long long row = m + 32 * (i / 2) + 4 * group + 2 * (i % 2) + half;
        UNROLL for (int k = 0; k < 2; ++k) {
            const long long column = n - 4 * group + 8 * quad + 4 * k;
            Real four[4];
            UNROLL for (int j = 0; j < 4; ++j) four[j] = sums[i][j][2 * half + k];
            if (row < left && column < right) store<4>(out + (of * left + row) * right + column, four);
        }
    }
}
