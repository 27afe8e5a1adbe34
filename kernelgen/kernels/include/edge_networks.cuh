// Radial networks of edges: hidden features and their gradient in one kernel each, and SiLU's gradient.
// A kernel includes sections; one that speaks of NAME.cuh means the section NAME.
//// layers
// Where the fragments and the scales of matrix number `layer` of a radial network begin: the first has few inputs, a step
// of 16, and the others 16 STEPS. The emitter defines before: STEPS.
template <class T>
DEVICE T* fragments(T* packed, int layer) { return packed + (layer ? 1 + (layer - 1) * STEPS : 0) * 2 * STEPS * 32; }
template <class T>
DEVICE T* scales(T* backs, int layer) { return backs + layer * 16 * STEPS; }
//// network
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
//// matrices
// The matrices of a radial network times their factors, for its kernels: as they are, and transposed if `turned` is not
// null. A block has a tile of one of them. The emitter defines before: STEPS, LAYERS.
extern "C" __global__ void __launch_bounds__(THREADS) equitune_edge_matrices(
    const Real* __restrict__ m0, const Real* __restrict__ m1, const Real* __restrict__ m2, long long f0, long long f1,
    long long f2, uint4* __restrict__ packed, Real* __restrict__ backs, uint4* __restrict__ turned,
    Real* __restrict__ turned_backs, long long inputs) {
    constexpr int TILES = 2 * STEPS, HIDDEN = 16 * STEPS;
    const bool is_turned = blockIdx.x >= LAYERS * TILES;
    const int at = is_turned ? blockIdx.x - LAYERS * TILES : blockIdx.x;
    // The first matrix has few inputs: transposed it has two tiles.
    const int of_first = is_turned ? 2 : TILES;
    const int layer = at < of_first ? 0 : 1 + (at - of_first) / TILES, tile = layer ? (at - of_first) % TILES : at;
    const Real* const matrix = layer == 0 ? m0 : layer == 1 ? m1 : m2;
    const Real factor = Real(__longlong_as_double(layer == 0 ? f0 : layer == 1 ? f1 : f2));
    const long long from = layer ? HIDDEN : inputs;
    const long long depth = is_turned ? HIDDEN : from, columns = is_turned ? from : HIDDEN, steps = (depth + 15) / 16;
    pack_tile(matrix, is_turned ? 1 : HIDDEN, is_turned ? HIDDEN : 1, factor, fragments(is_turned ? turned : packed, layer),
              scales(is_turned ? turned_backs : backs, layer), tile, depth, columns, steps, tile * steps, 1);
}
//// value
// The value h.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_edge_network_value(
    const Real* __restrict__ x, const uint4* __restrict__ packed, const Real* __restrict__ backs, Real* __restrict__ h,
    long long rows, long long inputs) {
    const long long first = first_row();
    Rows<1> of_edges;
    Rows<STEPS> v, next, slopes;
    load_inputs(x, first, rows, inputs, of_edges);
    multiply(of_edges, packed, backs, v);
    activate(v, slopes);
    for (int layer = 1; layer < LAYERS; ++layer) {
        multiply(v, fragments(packed, layer), scales(backs, layer), next);
        activate(next, slopes);
        copy(next, v);
    }
    store_rows(h, first, rows, v);
}
//// gradient
// The gradient of x for cotangents g of h; features are computed again. turned: the transposed matrices.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_edge_network_gradient(
    const Real* __restrict__ x, const Real* __restrict__ g, const uint4* __restrict__ packed,
    const Real* __restrict__ backs, const uint4* __restrict__ turned, const Real* __restrict__ turned_backs,
    Real* __restrict__ of_x, long long rows, long long inputs) {
    const long long first = first_row();
    Rows<1> of_edges;
    Rows<STEPS> slopes[LAYERS], v, next;
    load_inputs(x, first, rows, inputs, of_edges);
    multiply(of_edges, packed, backs, v);
    activate(v, slopes[0]);
    UNROLL for (int layer = 1; layer < LAYERS; ++layer) {
        multiply(v, fragments(packed, layer), scales(backs, layer), next);
        activate(next, slopes[layer]);
        copy(next, v);
    }
    load_rows(g, first, rows, v);
    UNROLL for (int layer = LAYERS - 1; layer > 0; --layer) {
        scale_by(slopes[layer], v);
        multiply(v, fragments(turned, layer), scales(turned_backs, layer), next);
        copy(next, v);
    }
    scale_by(slopes[0], v);
    multiply(v, turned, turned_backs, of_edges);
    store_inputs(of_x, first, rows, inputs, of_edges);
}
//// silu_gradient
// The gradient by x of <c, a(x)> + <t, a'(x) g>, with a SiLU: a'(x) c + a''(x) g t; without c (null) the second term
// alone. A thread has four elements, a block's width apart. REAL is the type of an element.
extern "C" __global__ void __launch_bounds__(256) equitune_silu_gradient(
    const REAL* __restrict__ x, const REAL* __restrict__ c, const REAL* __restrict__ g, const REAL* __restrict__ t,
    REAL* __restrict__ out, long long count) {
    const long long first = blockIdx.x * 1024ll + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const long long i = first + 256 * k;
        if (i < count) {
            const REAL s = x[i], l = 1 / (1 + exp(-s)), q = l * (1 - l);
            const REAL second = q * (2 + s * (1 - 2 * l)) * g[i] * t[i];
            out[i] = c ? second + (l + s * q) * c[i] : second;
        }
    }
}
