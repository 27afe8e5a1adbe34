// out [splits, left, right]: parts of a^T b, the sums over rows of a [rows, left] and b [rows, right]. A block has 64 of
// the left columns, 32 WARPS of the right ones, and every `splits`-th run of 32 rows. Each row of a is scaled, and its
// scale goes over to b's row; 16 rows of a column of b are scaled together. The chain of sums in the tensor cores ends
// after 16 rows: they truncate. Of 16 rows a lane has quad, quad + 4, quad + 8 and quad + 12, of 32 columns four
// neighbouring ones. Rows come through shared memory: a's a run ahead, b's, of each warp, DEEP steps of 16 rows ahead.
constexpr int RUN = 32, LEFT = 64, RIGHT = 32, DEEP = 3;
constexpr int STRIDE = LEFT / 4 + 2;  // rows of different lanes lie in different banks

// Copies a run of a's rows, without waiting; beyond the columns others.
DEVICE void fetch_run(Pack<4>* to, const Real* a, long long run, long long m, long long rows, long long left) {
    for (int i = threadIdx.x; i < RUN * LEFT / 4; i += 32 * WARPS) {
        const int row = i / (LEFT / 4), four = i % (LEFT / 4);
        const long long column = m + 4 * four;
        fetch16(to[row * STRIDE + four].v, a + min(run + row, rows - 1) * left + (column < left ? column : 0));
    }
}

// Copies a lane's part of 16 rows of b, without waiting. A lane reads what it has copied.
DEVICE void fetch_step(Pack<4>* to, const Real* b, long long first, long long n, long long rows, long long right) {
    UNROLL for (int e = 0; e < 4; ++e)
        fetch16(to[32 * e].v, b + min(first + 4 * e, rows - 1) * right + (n < right ? n : 0));
}

// Two of a lane's rows of a (its first two of 16, or its last two) as halves of left operands.
DEVICE void put_rows(const Pack<4>* raw, int group, const Scale (&scale)[2], const bool (&inside)[2], uint4 (*part)[2][32], int half) {
    Real v[2][2][4];
    UNROLL for (int e = 0; e < 2; ++e) UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int k = 0; k < 4; ++k)
        v[i][e][k] = raw[4 * e * STRIDE + 8 * i + group].v[k] * (inside[e] ? scale[e].into : Real(0));
    UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int j = 0; j < 2; ++j) {
        unsigned hi[2], lo[2];
        UNROLL for (int k = 0; k < 2; ++k) split(v[i][0][2 * j + k], v[i][1][2 * j + k], hi[k], lo[k]);
        unsigned* const high = &part[2 * i + j][0][threadIdx.x % 32].x + 2 * half;
        unsigned* const low = &part[2 * i + j][1][threadIdx.x % 32].x + 2 * half;
        UNROLL for (int k = 0; k < 2; ++k) high[k] = hi[k], low[k] = lo[k];
    }
}

// Three blocks a multiprocessor took 0.68 of the time of two, whose registers do not spill (H200).
extern "C" __global__ void __launch_bounds__(32 * WARPS, WARPS == 4 ? 3 : 1) equitune_tall_sums(
    const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, long long rows, long long left,
    long long right, long long splits) {
    __shared__ uint4 parts[RUN / 16][4][2][32];
    __shared__ Pack<4> of_a[RUN * STRIDE], of_b[WARPS][DEEP][4 * 32];
    __shared__ Real backs[RUN];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const long long across = (right + RIGHT * WARPS - 1) / (RIGHT * WARPS), of = blockIdx.x % splits;
    const long long n = (blockIdx.x / splits % across * WARPS + warp) * RIGHT + 4 * group;
    const long long m = blockIdx.x / splits / across * LEFT;
    Real sums[4][4][4] = {};
    long long ahead = of * RUN;  // the step of b that is copied next
    int in_run = 0, slot = 0, free = 0;
    const auto fetch_next = [&] {
        if (ahead < rows) fetch_step(of_b[warp][free] + lane, b, ahead + 16 * in_run + quad, n, rows, right);
        end_fetch();
        free = free + 1 == DEEP ? 0 : free + 1;
        in_run ^= 1;
        if (in_run == 0) ahead += splits * RUN;
    };
    fetch_run(of_a, a, of * RUN, m, rows, left);
    UNROLL for (int i = 0; i + 1 < DEEP; ++i) fetch_next();
    for (long long run = of * RUN; run < rows; run += splits * RUN) {
        await_fetches<1>();  // a's run and b's first step are there
        __syncthreads();
        for (int piece = warp; piece < RUN / 8; piece += WARPS) {
            Scale scale[2];
            bool inside[2];
            const int first = piece / 2 * 16 + piece % 2 * 8 + quad;
            UNROLL for (int e = 0; e < 2; ++e) {
                unsigned largest = 0;
                UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int k = 0; k < 4; ++k)
                    largest = max(largest, magnitude(of_a[(first + 4 * e) * STRIDE + 8 * i + group].v[k]));
                UNROLL for (int bit = 4; bit < 32; bit *= 2)
                    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, bit));
                scale[e] = scale_of(largest);
                inside[e] = run + first + 4 * e < rows;
                if (group == 0) backs[first + 4 * e] = scale[e].back;
            }
            put_rows(of_a + first * STRIDE, group, scale, inside, parts[piece / 2], piece % 2);
        }
        __syncthreads();
        if (run + splits * RUN < rows) fetch_run(of_a, a, run + splits * RUN, m, rows, left);
        UNROLL for (int s = 0; s < RUN / 16; ++s) {
            fetch_next();
            await_fetches<DEEP - 1>();
            unsigned largest[4] = {}, hi[4][2], lo[4][2];
            Real v[4][4], back[4][2];
            UNROLL for (int e = 0; e < 4; ++e) {
                const Real of_row = backs[16 * s + quad + 4 * e];
                UNROLL for (int k = 0; k < 4; ++k) {
                    v[e][k] = of_b[warp][slot][32 * e + lane].v[k] * of_row;
                    largest[k] = max(largest[k], magnitude(v[e][k]));
                }
            }
            slot = slot + 1 == DEEP ? 0 : slot + 1;
            UNROLL for (int k = 0; k < 4; ++k) {
                const Scale scale = scale_of_row(largest[k]);
                UNROLL for (int e = 0; e < 2; ++e) {
                    split(v[2 * e][k] * scale.into, v[2 * e + 1][k] * scale.into, hi[k][e], lo[k][e]);
                    // A result's column is that of the lanes of group 2 quad + e.
                    back[k][e] = __shfl_sync(0xffffffffu, scale.back, 8 * quad + 4 * e, 32);
                }
            }
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
