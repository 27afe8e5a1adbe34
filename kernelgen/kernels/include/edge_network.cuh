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

// 1 / (1 + exp(-z)). The GPU's own exponential and reciprocal have errors of the last two bits, and z's rounding is in the
// exponent: together at most float32's of a feature of order one.
DEVICE Real logistic(Real z) {
#ifdef __CUDA_ARCH__
    Real power, value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(1 + power));
    return value;
#else
    return 1 / (1 + exp(-z));
#endif
}
// SiLU and its derivative.
DEVICE Real silu(Real z, Real& slope) {
    const Real l = logistic(z), value = z * l;
    slope = l + value * (1 - l);
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

// A lane's rows of a matrix [rows, 16 STEPS]; beyond the last row those of the last.
DEVICE void load_rows(const Real* matrix, long long first, long long rows, Rows<STEPS>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int s = 0; s < STEPS; ++s)
        load<4>(matrix + min(first + 8 * half, rows - 1) * 16 * STEPS + 16 * s + 4 * (threadIdx.x % 4), v[s][half]);
}
DEVICE void store_rows(Real* matrix, long long first, long long rows, const Rows<STEPS>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int s = 0; s < STEPS; ++s)
        if (first + 8 * half < rows)
            store<4>(matrix + (first + 8 * half) * 16 * STEPS + 16 * s + 4 * (threadIdx.x % 4), v[s][half]);
}
// The same of the network's input, [rows, inputs] with any number of inputs up to 16; others are zero.
DEVICE void load_inputs(const Real* x, long long first, long long rows, long long inputs, Rows<1>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int i = 0; i < 4; ++i) {
        const int column = 4 * (threadIdx.x % 4) + i;
        v[0][half][i] = column < inputs ? x[min(first + 8 * half, rows - 1) * inputs + column] : Real(0);
    }
}
DEVICE void store_inputs(Real* x, long long first, long long rows, long long inputs, const Rows<1>& v) {
    UNROLL for (int half = 0; half < 2; ++half) UNROLL for (int i = 0; i < 4; ++i) {
        const long long row = first + 8 * half, column = 4 * (threadIdx.x % 4) + i;
        if (row < rows && column < inputs) x[row * inputs + column] = v[0][half][i];
    }
}
DEVICE long long first_row() {
    return (blockIdx.x * (long long)WARPS + threadIdx.x / 32) * 16 + threadIdx.x % 32 / 4;
}
