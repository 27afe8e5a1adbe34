// Until the kernel before this one has ended, and all that it wrote can be seen.
#ifdef __CUDA_ARCH__
DEVICE void await_zeros() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
#endif
