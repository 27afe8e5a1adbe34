// What both kernels of radial networks share: LAYERS times a product of each row with a matrix, then SiLU, from x [rows,
// inputs] to h [rows, 16 STEPS]. A warp has 16 rows, whose features stay in its registers. Matrices are as tall_matrix.cuh
// leaves them, by tiles, one after the other. What a lane gets of a product, four neighbouring columns of rows group and
// group + 8, are its elements along the depth of the next one. The emitter defines before: STEPS, LAYERS.
template <int N>
using Rows = Real[N][2][4];

// to = from times the matrix; rows of `from` are scaled as those of tall products are.
template <int FROM, int TO>
DEVICE void multiply(const Rows<FROM>& from, const uint4* packed, const Real* backs, Rows<TO>& to) {
    const int lane = threadIdx.x % 32;
    Part part[FROM];
    Real back[2];
    UNROLL for (int half = 0; half < 2; ++half) {
        unsigned largest = 0;
        UNROLL for (int s = 0; s < FROM; ++s)
            UNROLL for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(from[s][half][i]));
        const Scale scale = scale_of_row(largest);
        back[half] = scale.back;
        UNROLL for (int s = 0; s < FROM; ++s) put_part(from[s][half], scale.into, half, part[s]);
    }
    UNROLL for (int pair = 0; pair < TO; ++pair) {
        Real of_column[4];
        load<4>(backs + 16 * pair + 4 * (lane % 4), of_column);
        UNROLL for (int t = 0; t < 2; ++t) {
            uint4 b[FROM];
            UNROLL for (int s = 0; s < FROM; ++s) b[s] = packed[((2 * pair + t) * FROM + s) * 32 + lane];
            Real d[4] = {};
            multiply_parts(part, b, d);
            UNROLL for (int i = 0; i < 4; ++i)
                to[pair][i / 2][2 * t + i % 2] = d[i] * back[i / 2] * of_column[2 * t + i % 2];
        }
    }
}

// SiLU and its derivative.
DEVICE Real silu(Real z, Real& slope) {
    const Real logistic = 1 / (1 + exp(-z)), value = z * logistic;
    slope = logistic + value * (1 - logistic);
    return value;
}
DEVICE void activate(Rows<STEPS>& z, Rows<STEPS>& slopes) {
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int half = 0; half < 2; ++half)
        UNROLL for (int i = 0; i < 4; ++i) z[s][half][i] = silu(z[s][half][i], slopes[s][half][i]);
}

DEVICE void copy(const Rows<STEPS>& from, Rows<STEPS>& to) {
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int half = 0; half < 2; ++half)
        UNROLL for (int i = 0; i < 4; ++i) to[s][half][i] = from[s][half][i];
}
DEVICE void scale_by(const Rows<STEPS>& slopes, Rows<STEPS>& v) {
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int half = 0; half < 2; ++half)
        UNROLL for (int i = 0; i < 4; ++i) v[s][half][i] *= slopes[s][half][i];
}

// A lane's rows of a matrix with `columns`, which are a multiple of 4; beyond the last row those of the last.
template <int N>
DEVICE void load_rows(const Real* matrix, long long first, long long rows, long long columns, Rows<N>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int s = 0; s < N; ++s)
        load_four(matrix + min(first + 8 * half, rows - 1) * columns, 16 * s + 4 * (threadIdx.x % 4), columns, v[s][half]);
}
template <int N>
DEVICE void store_rows(Real* matrix, long long first, long long rows, long long columns, const Rows<N>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int s = 0; s < N; ++s) {
        const long long row = first + 8 * half, column = 16 * s + 4 * (threadIdx.x % 4);
        if (row < rows && column < columns) store<4>(matrix + row * columns + column, v[s][half]);
    }
}
DEVICE long long first_row() {
    return (blockIdx.x * (long long)WARPS + threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4;
}
