// Products of tensor cores with float32's accuracy (mma.m16n8k16 of halves, sums in float32, sm_80 on): values are
// scaled by powers of two and split into two halves. The emitter defines LOW before: whether there are low parts.
DEVICE Real real_of(unsigned bits) {
    union { unsigned u; float f; } both;
    both.u = bits;
    return both.f;
}
DEVICE unsigned magnitude(Real value) {
    union { float f; unsigned u; } both;
    both.f = value;
    return both.u & 0x7fffffffu;
}

#ifdef __CUDA_ARCH__
// Two values rounded to half precision.
DEVICE unsigned halves(Real low, Real high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
DEVICE Real low_half(unsigned both) {
    Real value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(value) : "r"(both));
    return value;
}
DEVICE Real high_half(unsigned both) {
    Real value;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(both));
    return value;
}
// d += a b: 16 x 16 times 16 x 8.
DEVICE void multiply_add(Real (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// Powers of two: `into` brings the largest magnitude below 2^15, `back` undoes it. Magnitudes below 2^-66 stay small.
struct Scale {
    Real into, back;
};
DEVICE Scale scale_of(unsigned largest) {
    const unsigned exponent = max(largest >> 23, 60u);
    return {real_of((268u - exponent) << 23), real_of((exponent - 14u) << 23)};
}

// Two values as halves, and what the halves leave out.
DEVICE void split(Real low, Real high, unsigned& hi, unsigned& lo) {
    hi = halves(low, high);
    if (LOW) lo = halves(low - low_half(hi), high - high_half(hi));
}
