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
