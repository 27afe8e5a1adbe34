// Zeros that the first blocks of a kernel write to what the others add to, who wait for that before their first sum.
// The stream has two words for it: `ready`, the number of the last launch whose zeros are there, and behind it how many
// blocks have written theirs, which is zero again when all have. The first blocks start first and wait for none.
#define ZEROS_INSIDE 1

// A block's share of an array that begins at a multiple of 16 bytes.
template <class T>
DEVICE void write_zeros(T* out, long long count, int blocks) {
    const long long quads = count * sizeof(T) / 16, rest = count - quads * 16 / sizeof(T);
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
#pragma unroll 1
    for (long long i = first; i < quads; i += blocks * (long long)blockDim.x)
        reinterpret_cast<uint4*>(out)[i] = make_uint4(0, 0, 0, 0);
    if (first < rest) out[count - rest + first] = 0;
}

// No fences of their own: where there is one, the compiler makes sums that nobody reads wait for what was there.
DEVICE void tell_of_zeros(unsigned long long* ready, unsigned long long launch, unsigned blocks) {
    __syncthreads();
    if (threadIdx.x) return;
    unsigned* const written = reinterpret_cast<unsigned*>(ready + 1);
    unsigned before;
#ifdef __CUDA_ARCH__
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(written), "r"(blocks - 1) : "memory");
    if (before == blocks - 1) asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(ready), "l"(launch) : "memory");
#else
    before = atomicInc(written, blocks - 1);
    if (before == blocks - 1) *ready = launch;
#endif
}

#ifdef __CUDA_ARCH__
DEVICE void await_zeros(const unsigned long long* ready, unsigned long long launch) {
    unsigned long long seen;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(ready) : "memory");
    while (seen != launch);
}
#endif
