// A kernel that asks the L2 cache for its own machine code, each thread of the grid for some of its lines.
#ifndef CODE_BYTES
#define CODE_BYTES (1 << 20)  // of the first of two compilations; kernelgen.compile then knows the size
#endif
#ifdef __CUDA_ARCH__
#define ASK_CODE(entry)                                                                                      \
    {                                                                                                        \
        unsigned long long code;                                                                             \
        asm("mov.u64 %0, " #entry ";" : "=l"(code));                                                         \
        const long long threads = (long long)gridDim.x * blockDim.x;                                         \
        long long at = 128 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);                             \
        for (; at < CODE_BYTES; at += 128 * threads) asm volatile("prefetch.global.L2 [%0];" ::"l"(code + at)); \
    }
#else
#define ASK_CODE(entry)
#endif
