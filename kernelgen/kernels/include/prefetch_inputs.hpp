// Asks the L2 cache for a whole array (or none, if it is null): a line a thread of the grid in most cases, without a loop.
template <class T>
DEVICE void ask_along(const T* p, long long count) {
#ifdef __CUDA_ARCH__
    const unsigned bytes = p ? unsigned(min(count * (long long)sizeof(T), 0xffffffffll)) : 0;
    const unsigned at = 128 * (blockIdx.x * blockDim.x + threadIdx.x);
    const unsigned long long from = __cvta_generic_to_global(p);
    if (at < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    const unsigned long long step = 128ull * gridDim.x * blockDim.x;
    if (step < bytes)
#pragma unroll 1
        for (unsigned long long i = at + step; i < bytes; i += step) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
#endif
}
