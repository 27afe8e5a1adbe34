// Products of tall matrices, [rows, depth] by [depth, columns], in tensor cores; and sums over their rows.
// A kernel includes sections; one that speaks of NAME.cuh means the section NAME.
//// rows
// What the kernels of tall products share: rows of a, four neighbouring elements a lane, and copies of the other matrix
// to shared memory. A warp has 16 MORE rows; a lane has group = lane / 4 and quad = lane % 4, and rows group and
// group + 8 of each 16. Without low parts (LOW, see tensor_cores.cuh) there is one product in place of three. The emitter
// defines before: MORE, WARPS.
constexpr int ROWS = 16 * MORE;

// High and low parts of a lane's elements of 16 rows along 16 of the depth: left operands of products.
struct Part {
    unsigned hi[4], lo[4];
};

// Four elements of a row from k on; beyond the depth others of the row, which meet zeros.
DEVICE void load_four(const Real* row, long long k, long long depth, Real (&v)[4]) { load<4>(row + (k < depth ? k : 0), v); }

// Row number `half` (0: group, 1: group + 8) of a part.
DEVICE void put_part(const Real (&v)[4], Real into, int half, Part& part) {
    split(v[0] * into, v[1] * into, part.hi[half], part.lo[half]);
    split(v[2] * into, v[3] * into, part.hi[half + 2], part.lo[half + 2]);
}

// The scale of a row (or of a column) whose four lanes have their largest magnitudes.
DEVICE Scale scale_of_row(unsigned largest) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return scale_of(largest);
}

// d += part b without the products of low parts; small sums first, and the chain in the tensor cores is short.
template <int N>
DEVICE void multiply_parts(const Part (&part)[N], const uint4 (&b)[N], Real (&d)[4]) {
    if (LOW) {
        UNROLL for (int s = 0; s < N; ++s) {
            const unsigned hi[2] = {b[s].x, b[s].y}, lo[2] = {b[s].z, b[s].w};
            multiply_add(d, part[s].lo, hi);
            multiply_add(d, part[s].hi, lo);
        }
    }
    UNROLL for (int s = 0; s < N; ++s) {
        const unsigned hi[2] = {b[s].x, b[s].y};
        multiply_add(d, part[s].hi, hi);
    }
}

// COUNT pieces of 16 bytes, from number `first` of `all` on, by all threads of a block, without waiting.
template <int COUNT>
DEVICE void fetch(void* to, const void* from, long long first, long long all) {
    for (int i = threadIdx.x; i < COUNT; i += 32 * WARPS)
        if (first + i < all)
            fetch16(static_cast<Real*>(to) + 4 * i, static_cast<const Real*>(from) + 4 * (first + i));
}
//// tiles
// b [depth, columns], in memory b[k * by_k + n * by_n], times a factor, as the kernels of tall products read it: halves,
// high and low, in fragments of the tensor cores. A block has 8 of the columns, a tile; backs are the columns' scales. Two
// neighbouring tiles have 16 neighbouring columns, so that a lane's four results are neighbours; a lane's four elements
// along the depth are neighbours too. Fragment `step` of the tile, of 16 along the depth, is number first + step * apart.
// The emitter defines before: THREADS (a power of two).
DEVICE void pack_tile(const Real* b, long long by_k, long long by_n, Real factor, uint4* packed, Real* backs, int tile,
                      long long depth, long long columns, long long steps, long long first, long long apart) {
    __shared__ unsigned largest[THREADS];
    const int thread = threadIdx.x;
    const auto column_of = [&](int place) { return 16 * (tile / 2) + 4 * (place / 2) + 2 * (tile % 2) + place % 2; };
    // Neighbouring threads have neighbours in memory.
    const int place = by_k < by_n ? thread / (THREADS / 8) : thread % 8;
    const int begin = by_k < by_n ? thread % (THREADS / 8) : thread / 8, mine = column_of(place);
    unsigned most = 0;
    if (mine < columns)
        for (long long k = begin; k < depth; k += THREADS / 8) most = max(most, magnitude(b[k * by_k + mine * by_n] * factor));
    largest[begin * 8 + place] = most;
    __syncthreads();
    for (int half = THREADS / 2; half >= 8; half /= 2) {
        if (thread < half) largest[thread] = max(largest[thread], largest[thread + half]);
        __syncthreads();
    }
    if (thread < 8) backs[column_of(thread)] = scale_of(largest[thread]).back;
    for (long long at = thread; at < steps * 32; at += THREADS) {
        const long long step = at / 32;
        const int in_tile = at % 32 / 4, n = column_of(in_tile);
        const Scale scale = scale_of(largest[in_tile]);
        Real v[4];
        UNROLL for (int i = 0; i < 4; ++i) {
            const long long k = 16 * step + 4 * (at % 4) + i;
            v[i] = k < depth && n < columns ? b[k * by_k + n * by_n] * factor * scale.into : Real(0);
        }
        unsigned hi[2], lo[2];
        split(v[0], v[1], hi[0], lo[0]);
        split(v[2], v[3], hi[1], lo[1]);
        packed[(first + step * apart) * 32 + at % 32] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
    }
}
//// tall_matrix
// One matrix for the kernels of tall products. The emitter defines before: STEPS_FIRST (whether the tiles of a step of 16
// along the depth lie together, or the steps of a tile).
extern "C" __global__ void __launch_bounds__(THREADS) equitune_tall_matrix(
    const Real* __restrict__ b, long long by_k, long long by_n, uint4* __restrict__ packed, Real* __restrict__ backs,
    long long depth, long long columns, long long tiles, long long steps) {
    const int tile = blockIdx.x;
    const long long first = STEPS_FIRST ? tile : tile * steps, apart = STEPS_FIRST ? tiles : 1;
    pack_tile(b, by_k, by_n, Real(1), packed, backs, tile, depth, columns, steps, first, apart);
}
//// to_wide
// c [rows, columns] = a [rows, depth] b, where a warp keeps its rows of a; b as tall_matrix.cuh leaves it, by tiles. a's
// rows are `apart` elements from each other. The emitter defines before: STEPS (of 16, the depth), TILES (of 8 columns,
// in shared memory at a time; an even number).
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_tall_to_wide(
    const Real* __restrict__ a, const uint4* __restrict__ packed, const Real* __restrict__ backs, Real* __restrict__ c,
    long long rows, long long depth, long long columns, long long apart) {
    __shared__ uint4 staged[2][TILES * STEPS * 32];
    __shared__ Pack<4> scales[2][TILES * 2];  // a load from memory would wait behind the stores
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const long long first = (blockIdx.x * (long long)WARPS + threadIdx.x / 32) * ROWS + group;
    const long long all = (columns + 15) / 16 * 2 * STEPS * 32;
    constexpr int EACH = TILES * STEPS * 32;
    fetch<EACH>(staged[0], packed, 0, all);
    fetch<TILES * 2>(scales[0], backs, 0, (columns + 15) / 16 * 4);
    end_fetch();
    Part part[MORE][STEPS];
    Real back[MORE][2];
    UNROLL for (int m = 0; m < MORE; ++m) UNROLL for (int half = 0; half < 2; ++half) {
        const Real* const row = a + min(first + 16 * m + 8 * half, rows - 1) * apart;
        Real v[STEPS][4];
        unsigned largest = 0;
        UNROLL for (int s = 0; s < STEPS; ++s) {
            load_four(row, 16 * s + 4 * quad, depth, v[s]);
            UNROLL for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(v[s][i]));
        }
        const Scale scale = scale_of_row(largest);
        back[m][half] = scale.back;
        UNROLL for (int s = 0; s < STEPS; ++s) put_part(v[s], scale.into, half, part[m][s]);
    }
    for (int stage = 0; 8ll * TILES * stage < columns; ++stage) {
        await_fetches<0>();
        __syncthreads();
        fetch<EACH>(staged[(stage + 1) % 2], packed, (long long)EACH * (stage + 1), all);
        fetch<TILES * 2>(scales[(stage + 1) % 2], backs, 2ll * TILES * (stage + 1), (columns + 15) / 16 * 4);
        end_fetch();
        const uint4* const here = staged[stage % 2] + lane;
        UNROLL for (int pair = 0; pair < TILES / 2; ++pair) {
            const long long n = 8ll * TILES * stage + 16 * pair + 4 * quad;
            if (n - 4 * quad >= columns) break;
            Real d[MORE][2][4] = {};
            UNROLL for (int t = 0; t < 2; ++t) {
                uint4 b[STEPS];
                UNROLL for (int s = 0; s < STEPS; ++s) b[s] = here[((2 * pair + t) * STEPS + s) * 32];
                UNROLL for (int m = 0; m < MORE; ++m) multiply_parts(part[m], b, d[m][t]);
            }
            const Pack<4> of_column = scales[stage % 2][4 * pair + quad];
            UNROLL for (int m = 0; m < MORE; ++m) UNROLL for (int half = 0; half < 2; ++half) {
                const long long row = first + 16 * m + 8 * half;
                Real four[4];
                UNROLL for (int i = 0; i < 4; ++i)
                    four[i] = d[m][i / 2][2 * half + i % 2] * back[m][half] * of_column.v[i];
                if (row < rows && n < columns) store<4>(c + row * columns + n, four);
            }
        }
    }
}
//// to_narrow
// c [rows, columns] = a [rows, depth] b, where a warp keeps its rows of c; b as tall_matrix.cuh leaves it, by steps. a's
// rows are `apart` elements from each other. Both come through shared memory, 32 of the depth at a time: a unit. Rows of
// a are scaled for each unit, after which the chain of sums in the tensor cores ends: they truncate. The emitter defines
// before: TILES (of 8 columns, an even number).
constexpr int UNIT = 32;

// Where four elements of a row of a unit are: rows of lanes that read together lie in different banks.
DEVICE int place_of(int row, int four) { return row * (UNIT / 4) + (four ^ row % 2 * 4); }

// Copies a unit of a warp's rows, without waiting.
DEVICE void fetch_rows(Pack<4>* to, const Real* a, long long first, long long k, long long rows, long long depth, long long apart) {
    UNROLL for (int i = 0; i < ROWS * UNIT / 4 / 32; ++i) {
        const int row = 4 * i + threadIdx.x % 32 / 8, four = threadIdx.x % 8;
        const long long at = k + 4 * four;  // beyond the depth others, which meet zeros
        fetch16(to[place_of(row, four)].v, a + min(first + row, rows - 1) * apart + (at < depth ? at : 0));
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_tall_to_narrow(
    const Real* __restrict__ a, const uint4* __restrict__ packed, const Real* __restrict__ backs, Real* __restrict__ c,
    long long rows, long long depth, long long columns, long long apart) {
    constexpr int EACH = UNIT / 16 * TILES * 32;
    __shared__ uint4 of_b[2][EACH];
    __shared__ Pack<4> of_a[2][WARPS][ROWS * UNIT / 4];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const long long first = (blockIdx.x * (long long)WARPS + warp) * ROWS;
    const int units = int((depth + UNIT - 1) / UNIT);
    fetch<EACH>(of_b[0], packed, 0, EACH);
    fetch_rows(of_a[0][warp], a, first, 0, rows, depth, apart);
    end_fetch();
    Real sums[MORE][TILES][4] = {};
    for (int unit = 0; unit < units; ++unit) {
        const int here = unit % 2, there = 1 - here;
        await_fetches<0>();
        __syncthreads();
        if (unit + 1 < units) {
            fetch<EACH>(of_b[there], packed + (long long)EACH * (unit + 1), 0, EACH);
            fetch_rows(of_a[there][warp], a, first, (long long)UNIT * (unit + 1), rows, depth, apart);
        }
        end_fetch();
        Part part[MORE][2];
        Real back[MORE][2];
        UNROLL for (int m = 0; m < MORE; ++m) UNROLL for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + group;
            Pack<4> v[2];
            unsigned largest = 0;
            UNROLL for (int s = 0; s < 2; ++s) {
                v[s] = of_a[here][warp][place_of(row, 4 * s + quad)];
                UNROLL for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(v[s].v[i]));
            }
            const Scale scale = scale_of_row(largest);
            back[m][half] = scale.back;
            UNROLL for (int s = 0; s < 2; ++s) put_part(v[s].v, scale.into, half, part[m][s]);
        }
        UNROLL for (int t = 0; t < TILES; ++t) {
            const uint4 b[2] = {of_b[here][t * 32 + lane], of_b[here][(TILES + t) * 32 + lane]};
            UNROLL for (int m = 0; m < MORE; ++m) {
                Real d[4] = {};
                multiply_parts(part[m], b, d);
                UNROLL for (int i = 0; i < 4; ++i) sums[m][t][i] += d[i] * back[m][i / 2];
            }
        }
    }
    UNROLL for (int pair = 0; pair < TILES / 2; ++pair) {
        const long long n = 16 * pair + 4 * quad;
        if (n >= columns) break;
        Real of_column[4];
        load<4>(backs + n, of_column);
        UNROLL for (int m = 0; m < MORE; ++m) UNROLL for (int half = 0; half < 2; ++half) {
            const long long r = first + 16 * m + 8 * half + group;
            Real four[4];
            UNROLL for (int i = 0; i < 4; ++i) four[i] = sums[m][2 * pair + i / 2][2 * half + i % 2] * of_column[i];
            if (r < rows) store<4>(c + r * columns + n, four);
        }
    }
}
//// sums
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
DEVICE void put_rows(const Real* raw, int group, int quad, long long inside, uint4 (*parts)[1 + LOW][32], Real* backs) {
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
        if (LOW) parts[2 * i + j][1][threadIdx.x % 32] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
}

// Three blocks share a multiprocessor, at the price of a few spilled registers.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) equitune_tall_sums(
    const Real* __restrict__ a, const Real* __restrict__ b, Real* __restrict__ out, long long rows, long long left,
    long long right, long long splits) {
    __shared__ uint4 parts[RUN / 16][4][1 + LOW][32];
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
                const uint4 high = parts[s][i][0][lane], low = parts[s][i][LOW][lane];
                const unsigned of_high[4] = {high.x, high.y, high.z, high.w}, of_low[4] = {low.x, low.y, low.z, low.w};
                UNROLL for (int k = 0; k < 4; ++k) {
                    Real d[4] = {};
                    if (LOW) multiply_add(d, of_low, hi[k]);
                    if (LOW) multiply_add(d, of_high, lo[k]);
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
//// halves
// Rows of a [rows, depth], `apart` elements from each other, each times a power of two, as halves: of a row first the high
// parts, then the low ones, or the other way round. backs are the rows' scales. A warp has a row. The emitter defines
// before: WARPS.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_tall_halves(
    const Real* __restrict__ a, uint2* __restrict__ out, Real* __restrict__ backs, long long rows, long long depth,
    long long apart, long long low_first) {
    const int lane = threadIdx.x % 32;
    const long long row = min(blockIdx.x * (long long)WARPS + threadIdx.x / 32, rows - 1), pieces = depth / 4;
    unsigned largest = 0;
    for (long long i = lane; i < pieces; i += 32) {
        Real v[4];
        load<4>(a + row * apart + 4 * i, v);
        UNROLL for (int j = 0; j < 4; ++j) largest = max(largest, magnitude(v[j]));
    }
    for (int other = 16; other; other /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, other));
    const Scale scale = scale_of(largest);
    if (lane == 0) backs[row] = scale.back;
    uint2* const first = out + (LOW ? 2 : 1) * row * pieces;
    uint2* const high = first + (LOW && low_first ? pieces : 0);
    uint2* const low = first + (low_first ? 0 : pieces);
    for (long long i = lane; i < pieces; i += 32) {
        Real v[4];
        load<4>(a + row * apart + 4 * i, v);
        unsigned hi[2], lo[2];
        split(v[0] * scale.into, v[1] * scale.into, hi[0], lo[0]);
        split(v[2] * scale.into, v[3] * scale.into, hi[1], lo[1]);
        high[i] = make_uint2(hi[0], hi[1]);
        if (LOW) low[i] = make_uint2(lo[0], lo[1]);
    }
}
//// scales
// out [rows, columns], each element times the scales of its row and of its column, and greater by the part that was lost
// (the bits of a double). A thread has four neighbours. The emitter defines before: WARPS.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_tall_scales(
    Real* __restrict__ out, const Real* __restrict__ of_rows, const Real* __restrict__ of_columns, long long rows,
    long long columns, long long lost) {
    const long long at = 4 * (blockIdx.x * (32ll * WARPS) + threadIdx.x);
    if (at >= rows * columns) return;
    const Real of_row = of_rows[at / columns];
    Real v[4], of_column[4];
    load<4>(out + at, v);
    load<4>(of_columns + at % columns, of_column);
    UNROLL for (int j = 0; j < 4; ++j) {
        v[j] *= of_row * of_column[j];
        v[j] += Real(__longlong_as_double(lost)) * v[j];
    }
    store<4>(out + at, v);
}
