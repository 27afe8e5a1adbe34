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
