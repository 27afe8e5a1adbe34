// The hand-written part of a GPU's kernel of spherical harmonics. The emitter defines before it: Real, DIM (elements of a
// row of harmonics), BLOCK (vectors of a block), STRIDE (elements from row to row in shared memory) and WIDTH (elements
// that a thread copies at a time). STEP is the distance of two components of a vector's row where the statements find them.
#define DEVICE __device__ __forceinline__
#define SOME_TIMES _Pragma("unroll 4")
#define UNROLL _Pragma("unroll")
#define ONE_TIME _Pragma("unroll 1")
constexpr int STEP = 1;

struct alignas(WIDTH * sizeof(Real)) Pack {
    Real at[WIDTH];
};

// Where element i of a block's rows lies in shared memory.
DEVICE int place(unsigned i) { return i / DIM * STRIDE + i % DIM; }

// `count` elements of rows that lie together, by all threads of a block: from memory to shared memory, and back. Of a
// whole block FEW copies of a thread are under way at once: none waits for the one before it.
constexpr unsigned PACKS = BLOCK * DIM / WIDTH;
constexpr int FEW = 4;
DEVICE bool is_pack(unsigned first) { return first + BLOCK <= PACKS || first + threadIdx.x < PACKS; }

DEVICE void load_rows(const Real* __restrict__ rows, Real* __restrict__ shared, int count) {
    if (count < BLOCK * DIM) {
        ONE_TIME for (int i = threadIdx.x; i < count; i += BLOCK) shared[place(i)] = rows[i];
        return;
    }
    UNROLL for (unsigned first = 0; first < PACKS; first += FEW * BLOCK) {
        Pack pack[FEW];
        UNROLL for (int k = 0; k < FEW; ++k)
            if (is_pack(first + k * BLOCK)) pack[k] = reinterpret_cast<const Pack*>(rows)[first + k * BLOCK + threadIdx.x];
        UNROLL for (int k = 0; k < FEW; ++k)
            if (is_pack(first + k * BLOCK))
                UNROLL for (int j = 0; j < WIDTH; ++j)
                    shared[place((first + k * BLOCK + threadIdx.x) * WIDTH + j)] = pack[k].at[j];
    }
}
DEVICE void store_rows(const Real* __restrict__ shared, Real* __restrict__ rows, int count) {
    if (count < BLOCK * DIM) {
        ONE_TIME for (int i = threadIdx.x; i < count; i += BLOCK) rows[i] = shared[place(i)];
        return;
    }
    UNROLL for (unsigned first = 0; first < PACKS; first += BLOCK) {
        if (!is_pack(first)) return;
        Pack pack;
        UNROLL for (int j = 0; j < WIDTH; ++j) pack.at[j] = shared[place((first + threadIdx.x) * WIDTH + j)];
        reinterpret_cast<Pack*>(rows)[first + threadIdx.x] = pack;
    }
}
