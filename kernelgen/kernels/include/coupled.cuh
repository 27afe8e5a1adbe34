// Gradients with coupled cotangents: sums over components k of g of couplings C[i, j, k] g[k], one for each component i
// of x and j of y. They are the same for all edges of a receiver, so a warp has them in shared memory. Tensor cores
// multiply them with the edges' attributes y (what x and weights meet), and with weighted x (gradients of y).
// Of each 8 channels there are ROWS rows of 8 halves, and as many low parts behind them. A path has a row for each i
// and j; a load may have rows of another path, which meet zeros or give sums that nobody reads.
template <int ROWS>
DEVICE int low_part() { return LOW ? 8 * ROWS : 0; }

#ifdef __CUDA_ARCH__
// d += a b: 16 x 8 times 8 x 8.
DEVICE void multiply_add(Real (&d)[4], const unsigned (&a)[2], unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
#endif

// One channel of a node's block, scaled; zero beyond the last channel.
template <int MUL, int DIM>
DEVICE void take_channel(const Real* block, int v, Real scale, Real (&g)[DIM]) {
    UNROLL for (int m = 0; m < DIM; ++m)
        g[m] = v < MUL ? block[MUL_IR ? v * DIM + m : m * MUL + v] * scale : Real(0);
}
// The same in shared memory, by component.
template <int DIM>
DEVICE void leave_channel(const Real (&g)[DIM], Real* left) {
    UNROLL for (int m = 0; m < DIM; ++m) left[16 * m] = g[m];
}

// One channel of N rows.
template <int ROWS, int N>
DEVICE void leave_rows(const Real (&value)[N], unsigned short* place) {
    UNROLL for (int n = 0; n < N; n += 2) {
        unsigned hi, lo;
        split(value[n], n + 1 < N ? value[n + 1] : Real(0), hi, lo);
        UNROLL for (int k = 0; k < 2 && n + k < N; ++k) {
            place[8 * (n + k)] = (unsigned short)(hi >> 16 * k);
            if (LOW) place[8 * (n + k) + low_part<ROWS>()] = (unsigned short)(lo >> 16 * k);
        }
    }
}

// N components of an edge's y as a row of 16 halves: high parts, low parts and high parts again, for up to 5 of
// them; or high parts and, from the eighth on, low parts. All edges' first 8 are before all their others.
template <int N>
DEVICE void leave_attributes(const Real* y, unsigned short* place) {
    unsigned part[2][N + 1] = {}, words[8];
    UNROLL for (int n = 0; n < N; n += 2) {
        unsigned both[2] = {};
        split(y[n], n + 1 < N ? y[n + 1] : Real(0), both[0], both[1]);
        UNROLL for (int low = 0; low < 2; ++low) {
            part[low][n] = both[low] & 0xffffu;
            part[low][n + 1] = both[low] >> 16;
        }
    }
    UNROLL for (int w = 0; w < 8; ++w) {
        words[w] = 0;
        UNROLL for (int k = 0; k < 2; ++k) {
            const int s = 2 * w + k, each = N <= 5 || !LOW ? N : 8, turn = s / each, n = s % each;
            const bool is_there = n < N && turn < (!LOW ? 1 : N <= 5 ? 3 : 2);
            words[w] |= (is_there ? part[turn % 2][n < N ? n : 0] : 0u) << 16 * k;
        }
    }
    *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
    *reinterpret_cast<uint4*>(place + 8 * STAGE) = make_uint4(words[4], words[5], words[6], words[7]);
}
// The same of 16 edges as the left operand of a product.
DEVICE void take_attributes(const Warp& warp, const unsigned short* place, unsigned (&y)[4]) {
    load_matrix<false>(place + warp.lane % 16 * 8 + warp.lane / 16 * (8 * STAGE), y);
}

// What COUNT components of x meet, one or two: sums over the N components of y, for 16 edges and 8 channels.
template <int ROWS, int N, int COUNT>
DEVICE void couple(const Warp& warp, const unsigned short* rows, const unsigned (&y)[4], Real (&met)[2][4]) {
    const int lane = warp.lane, second = lane / 16 * ((COUNT - 1) * 8 * N);
    unsigned b[4];  // of both components
    UNROLL for (int n = 0; n < COUNT; ++n) UNROLL for (int k = 0; k < 4; ++k) met[n][k] = Real(0);
    if (N <= 5 || !LOW) {
        const int s = lane % 16;
        const int row = s < 3 * N ? s % N : N / 2;  // the last one of 5 components is no part: any row of another bank
        load_matrix<true>(rows + row * 8 + (s / N == 2 ? low_part<ROWS>() : 0) + second, b);
        UNROLL for (int n = 0; n < COUNT; ++n) multiply_add(met[n], y, {b[2 * n], b[2 * n + 1]});
    } else {
        load_matrix<true>(rows + min(lane % 8, N - 1) * 8 + (1 - lane / 8 % 2) * low_part<ROWS>() + second, b);
        UNROLL for (int n = 0; n < COUNT; ++n) multiply_add(met[n], y, {b[2 * n], b[2 * n + 1]});
        UNROLL for (int n = 0; n < COUNT; ++n) multiply_add(met[n], {y[0], y[1]}, b[2 * n + 1]);
    }
}

// Adds what COUNT weighted components of x give for 8 components of y, of 16 edges; columns are components. Small parts
// have a sum of their own.
template <int ROWS, int N, int COUNT>
DEVICE void add_to_attributes(const Warp& warp, const unsigned short* rows, const Real (&weighted)[2][4],
                              Real (&sums)[4], Real (&small)[4]) {
    const int lane = warp.lane, turn = COUNT == 2 ? lane / 16 : lane / 8 % 2;
    const int second = lane / 8 % 2 * ((COUNT - 1) * 8 * N);
    unsigned b[4], hi[4], lo[4];  // low parts of b are first: of both components, or of one
    load_matrix<false>(rows + lane % 8 * 8 + (1 - turn) * low_part<ROWS>() + second, b);
    UNROLL for (int n = 0; n < COUNT; ++n) UNROLL for (int i = 0; i < 2; ++i)
        split(weighted[n][2 * i], weighted[n][2 * i + 1], hi[2 * n + i], lo[2 * n + i]);
    if (COUNT == 2) {
        if (LOW) multiply_add(small, lo, {b[2], b[3]});
        if (LOW) multiply_add(small, hi, {b[0], b[1]});
        multiply_add(sums, hi, {b[2], b[3]});
    } else {
        if (LOW) multiply_add(small, {hi[0], hi[1], lo[0], lo[1]}, {b[0], b[1]});
        multiply_add(sums, {hi[0], hi[1]}, b[1]);
    }
}

// Two paths' gradients of weights as the left operand of a product; they are small enough for halves.
DEVICE void halve_gradients(const Real (&gradient)[2][4], unsigned (&hi)[4], unsigned (&lo)[4]) {
    UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int k = 0; k < 2; ++k)
        split(gradient[k][2 * i], gradient[k][2 * i + 1], hi[i + 2 * k], lo[i + 2 * k]);
}

// Adds the lane's two of 8 components of an edge's gradient of y, of which FIRST .. END - 1 are of the block. WIDTH:
// elements that an addition may have.
template <int FIRST, int END, int WIDTH>
DEVICE void put_pair(const Warp& warp, Real* start, const Real (&sums)[2], Real scale) {
    Real two[2];
    UNROLL for (int c = 0; c < 2; ++c) {
        const int m = 2 * warp.quad + c;
        two[c] = m >= FIRST && m < END ? sums[c] * scale : Real(0);
    }
    if (WIDTH == 2) {
        if (2 * warp.quad < END) add<2>(start + 2 * warp.quad, two);
    } else {
        UNROLL for (int c = 0; c < 2; ++c) {
            const Real one[1] = {two[c]};
            if (2 * warp.quad + c >= FIRST && 2 * warp.quad + c < END) add<1>(start + 2 * warp.quad + c, one);
        }
    }
}
