// Zeros that the first blocks of a kernel write to what the others add to, who wait for that before their first sum. The
// stream has lines of the cache for it: `written`, how many blocks have written theirs, which is zero again when all
// have, and COPIES of the number of the last launch whose zeros are there, so that not every block asks the same line.
// The first blocks start first and wait for none.
#define ZEROS_INSIDE 1
constexpr int LINE = 16, COPIES = 32;  // words of 8 bytes

DEVICE void ask_line(const unsigned long long* p) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
// Where a block that waits looks.
DEVICE const unsigned long long* ready_of(const unsigned long long* written) {
    return written + LINE * (1 + blockIdx.x % COPIES);
}

// A block's share of an array that begins at a multiple of 16 bytes.
template <class T>
DEVICE void write_zeros(T* out, long long count, int writers) {
    const long long quads = count * sizeof(T) / 16, rest = count - quads * 16 / sizeof(T);
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
#pragma unroll 1
    for (long long i = first; i < quads; i += writers * (long long)blockDim.x)
        reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    if (first < rest) out[count - rest + first] = 0;
}

// No fences of their own: where there is one, the compiler makes sums that nobody reads wait for what was there.
DEVICE void tell_of_zeros(unsigned long long* written, unsigned long long launch, unsigned writers) {
    __syncthreads();
    if (threadIdx.x >= COPIES) return;
    if (writers > 1) {
        unsigned before = 0;
        if (threadIdx.x == 0) {
#ifdef __CUDA_ARCH__
            asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                         : "=r"(before) : "l"(written), "r"(writers - 1) : "memory");
#else
            before = atomicInc(reinterpret_cast<unsigned*>(written), writers - 1);
#endif
        }
        if (__shfl_sync(0xffffffffu, before, 0, 32) != writers - 1) return;
        __syncwarp(0xffffffffu);
    }
    unsigned long long* const ready = written + LINE * (1 + threadIdx.x);
#ifdef __CUDA_ARCH__
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(ready), "l"(launch) : "memory");
#else
    *ready = launch;
#endif
}

#ifdef __CUDA_ARCH__
DEVICE void await_zeros(const unsigned long long* ready, unsigned long long launch) {
    unsigned long long seen;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(ready) : "memory");
    while (seen != launch);
}
#endif
