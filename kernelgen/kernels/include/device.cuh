// The hand-written part of every CUDA kernel: vector access, layouts, atomic sums and reductions over a team.
// The emitter defines before it: Real (float or double), LANES (lanes of a team), MUL_IR (layout of feature rows).
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")

template <int N>
struct alignas(N * sizeof(Real)) Pack {
    Real v[N];
};

// Asks the L2 cache for N elements ahead of their use, a line of 128 bytes at a time.
template <int N>
DEVICE void ask(const Real* p) {
#ifdef __CUDA_ARCH__
    UNROLL for (int i = 0; i < int(N * sizeof(Real)); i += 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p) + i));
#endif
}

// Asks the L2 cache for a whole array (or none, if it is null), each thread of the grid for some of its lines.
template <class T>
DEVICE void ask_all(const T* p, long long count) {
#ifdef __CUDA_ARCH__
    const long long threads = (long long)gridDim.x * blockDim.x, bytes = p ? count * sizeof(T) : 0;
    for (long long at = 128 * ((long long)blockIdx.x * blockDim.x + threadIdx.x); at < bytes; at += 128 * threads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p) + at));
#endif
}

// Accesses of rows that are used again, and of rows that are the first to leave the caches (on the GPU).
struct Keep {
    template <class T> static DEVICE T read(const T* p) { return *p; }
    template <class T> static DEVICE void write(T* p, const T& value) { *p = value; }
};
#ifdef __CUDA_ARCH__
template <int BYTES> struct Bits;
template <> struct Bits<4> { using Type = unsigned int; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<16> { using Type = uint4; };
struct Stream {
    template <class T> static DEVICE T read(const T* p) {
        const auto bits = __ldcs(reinterpret_cast<const typename Bits<sizeof(T)>::Type*>(p));
        return *reinterpret_cast<const T*>(&bits);
    }
    template <class T> static DEVICE void write(T* p, const T& value) {
        using Type = typename Bits<sizeof(T)>::Type;
        __stcs(reinterpret_cast<Type*>(p), *reinterpret_cast<const Type*>(&value));
    }
};
#else
using Stream = Keep;
#endif

// N consecutive elements at p, WIDTH of them an access; p is aligned to WIDTH elements.
template <int WIDTH, class Cache = Keep, int N>
DEVICE void load(const Real* p, Real (&r)[N]) {
    static_assert(N % WIDTH == 0, "whole packs");
    UNROLL for (int i = 0; i < N; i += WIDTH) {
        const Pack<WIDTH> pack = Cache::read(reinterpret_cast<const Pack<WIDTH>*>(p + i));
        UNROLL for (int k = 0; k < WIDTH; ++k) r[i + k] = pack.v[k];
    }
}

template <int WIDTH, class Cache = Keep, int N>
DEVICE void store(Real* p, const Real (&r)[N]) {
    static_assert(N % WIDTH == 0, "whole packs");
    UNROLL for (int i = 0; i < N; i += WIDTH) {
        Pack<WIDTH> pack;
        UNROLL for (int k = 0; k < WIDTH; ++k) pack.v[k] = r[i + k];
        Cache::write(reinterpret_cast<Pack<WIDTH>*>(p + i), pack);
    }
}

template <int WIDTH>
DEVICE void add_pack(Real* p, const Real* r) {
    UNROLL for (int k = 0; k < WIDTH; ++k) atomicAdd(p + k, r[k]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(REAL_IS_FLOAT)
// Compute capability 9.0 adds two or four floats in one transaction.
template <>
DEVICE void add_pack<2>(float* p, const float* r) {
    atomicAdd(reinterpret_cast<float2*>(p), make_float2(r[0], r[1]));
}
template <>
DEVICE void add_pack<4>(float* p, const float* r) {
    atomicAdd(reinterpret_cast<float4*>(p), make_float4(r[0], r[1], r[2], r[3]));
}
#endif

template <int WIDTH, int N>
DEVICE void add(Real* p, const Real (&r)[N]) {
    UNROLL for (int i = 0; i < N; i += WIDTH) add_pack<WIDTH>(p + i, r + i);
}

// What to do with a row of results.
struct Store {
    template <int WIDTH, int N>
    static DEVICE void put(Real* p, const Real (&r)[N]) { store<WIDTH>(p, r); }
};
struct StoreStream {
    template <int WIDTH, int N>
    static DEVICE void put(Real* p, const Real (&r)[N]) { store<WIDTH, Stream>(p, r); }
};
struct Add {
    template <int WIDTH, int N>
    static DEVICE void put(Real* p, const Real (&r)[N]) { add<WIDTH>(p, r); }
};

// Channels u .. u + C - 1 of one irreps block (DIM components, MUL channels) of a feature row, both layouts.
template <class Cache, int WIDTH, int MUL, int DIM, int C>
DEVICE void load_block(const Real* block, int u, bool active, Real (&r)[DIM][C]) {
    if (!active) {
        UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) r[m][c] = Real(0);
    } else if (MUL_IR) {
        Real flat[DIM * C];
        load<WIDTH, Cache>(block + u * DIM, flat);
        UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) r[m][c] = flat[c * DIM + m];
    } else {
        UNROLL for (int m = 0; m < DIM; ++m) load<WIDTH, Cache>(block + m * MUL + u, r[m]);
    }
}

template <class How, int WIDTH, int MUL, int DIM, int C>
DEVICE void put_block(Real* block, int u, bool active, const Real (&r)[DIM][C]) {
    if (!active) return;
    if (MUL_IR) {
        Real flat[DIM * C];
        UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) flat[c * DIM + m] = r[m][c];
        How::template put<WIDTH>(block + u * DIM, flat);
    } else {
        UNROLL for (int m = 0; m < DIM; ++m) How::template put<WIDTH>(block + m * MUL + u, r[m]);
    }
}

template <int DIM, int C>
DEVICE void clear(Real (&r)[DIM][C]) {
    UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) r[m][c] = Real(0);
}

// A team's sums of a node, left in shared memory: element (m, c) of its lane.
template <int DIM, int C>
DEVICE void leave(Real* p, const Real (&r)[DIM][C]) {
    UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) p[(m * C + c) * LANES] = r[m][c];
}

// The sum of what PARTS teams left, STEP elements from each other, in their order.
template <int PARTS, int STEP, int DIM, int C>
DEVICE void gather(const Real* p, Real (&r)[DIM][C]) {
    UNROLL for (int m = 0; m < DIM; ++m) UNROLL for (int c = 0; c < C; ++c) {
        r[m][c] = p[(m * C + c) * LANES];
        UNROLL for (int part = 1; part < PARTS; ++part) r[m][c] += p[part * STEP + (m * C + c) * LANES];
    }
}

// Weights of one path for channels u .. u + C - 1.
template <class Cache, int WIDTH, int C>
DEVICE void load_weights(const Real* p, bool active, Real (&r)[C]) {
    if (active) {
        load<WIDTH, Cache>(p, r);
    } else {
        UNROLL for (int c = 0; c < C; ++c) r[c] = Real(0);
    }
}

// LANES consecutive lanes of a warp that work through one run of edges together.
struct Team {
    int lane;
    unsigned mask;
    DEVICE int broadcast(int value, int from) const { return __shfl_sync(mask, value, from, LANES); }
    DEVICE void sync() const { __syncwarp(mask); }
};

// Sums N values over the team by recursive halving: at each step a lane passes on half of what it still holds.
// Each sum ends in one lane, which adds or stores it at row[index].
template <class How, int N>
DEVICE void sum_over_team(const Team& team, Real (&v)[N], Real* row) {
    int held = N, first = 0, end = N;  // halves of odd counts are padded: a lane's own sums end before `end`
    bool writes = true;
    UNROLL for (int bit = LANES / 2; bit > 0; bit /= 2) {
        const bool upper = (team.lane & bit) != 0;
        if (held > 1) {
            const int half = (held + 1) / 2;
            UNROLL for (int i = 0; i < (N + 1) / 2; ++i) {
                if (i < half) {
                    const Real high = i + half < held ? v[i + half] : Real(0);
                    const Real pass = upper ? v[i] : high;
                    const Real keep = upper ? high : v[i];
                    v[i] = keep + __shfl_xor_sync(team.mask, pass, bit);
                }
            }
            end = upper ? end : min(end, first + half);
            first += upper ? half : 0;
            held = half;
        } else {
            v[0] += __shfl_xor_sync(team.mask, v[0], bit);
            writes = writes && !upper;
        }
    }
    UNROLL for (int i = 0; i < (N + LANES - 1) / LANES; ++i) {
        Real one[1] = {v[i]};
        if (writes && i < held && first + i < end) How::template put<1>(row + first + i, one);
    }
}
