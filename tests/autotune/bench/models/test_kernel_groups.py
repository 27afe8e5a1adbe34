"""Kernels by what they are for: names as profilers give them."""

from __future__ import annotations

import pytest

from autotune.bench.contenders import OTHER, group_of, milliseconds_by_group, shares_text

NAMES = {
    "equitune_kernel": "Equitune's products and harmonics",
    "equitune_contraction": "Equitune's contractions",
    "equitune_tall_to_wide": "Equitune's matrix products",
    "sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8": "matrix products",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)": "matrix products",
    "nvjet_tst_128x64_64x6_1x2_h_bz_NNT": "matrix products",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": "copies and fills",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>": "copies and fills",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "copies and fills",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": "elementwise",
    "void at::native::indexSelectLargeIndex<float, long, unsigned int>": "gathers and sums by index",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>": "gathers and sums by index",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>": "sorting",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "sums",
    "something_new": OTHER,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_its_group(name: str) -> None:
    assert group_of(name) == NAMES[name]


def test_groups_are_summed_and_ordered() -> None:
    parts = milliseconds_by_group([("sgemm_a", 500.0), ("equitune_kernel", 900.0), ("sgemm_b", 600.0), ("x", 3.0)])
    assert list(parts.items()) == [
        ("matrix products", 1.1),
        ("Equitune's products and harmonics", 0.9),
        (OTHER, 0.003),
    ]
    assert shares_text(parts) == "matrix products 55%, Equitune's products and harmonics 45%"
    assert shares_text({}) == ""
