// Copies to shared memory that a lane does not wait for: sixteen bytes, the end of a group of copies, and until no more
// than COUNT of a lane's groups are under way.
DEVICE void fetch16(Real* to, const Real* from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    for (int i = 0; i < int(16 / sizeof(Real)); ++i) to[i] = from[i];
#endif
}
DEVICE void end_fetch() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int COUNT>
DEVICE void await_fetches() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
#endif
}
