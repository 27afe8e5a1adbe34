// Torch operations that kernels need around them, through torch's stable ABI.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace equitune {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Sizes = std::vector<std::int64_t>;

namespace detail {
using torch::stable::detail::from;
using torch::stable::detail::to;
}  // namespace detail

template <std::size_t N>
void dispatch(const char* name, const char* overload, std::array<StableIValue, N>& stack) {
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
}

inline Tensor rows_at(const Tensor& of, const Tensor& index) {
    std::array<StableIValue, 3> stack{detail::from(of), detail::from(std::int64_t{0}), detail::from(index)};
    dispatch("aten::index_select", "", stack);
    return detail::to<Tensor>(stack[0]);
}

// Rows summed into rows ``index`` of a new tensor. (aten::index_add takes a Scalar, which the stable ABI lacks.)
inline Tensor summed_at(const Tensor& rows, const Tensor& index, const Sizes& shape) {
    std::array<StableIValue, 3> expand{detail::from(torch::stable::unsqueeze(index, 1)), detail::from(Sizes(rows.sizes().begin(), rows.sizes().end())),
                                       detail::from(false)};
    dispatch("aten::expand", "", expand);
    const Tensor places = torch::stable::to(detail::to<Tensor>(expand[0]), ScalarType::Long);
    std::array<StableIValue, 4> stack{detail::from(torch::stable::new_zeros(rows, shape)), detail::from(std::int64_t{0}),
                                      detail::from(places), detail::from(rows)};
    dispatch("aten::scatter_add", "", stack);
    return detail::to<Tensor>(stack[0]);
}

inline Tensor sum_of_second(const Tensor& of) {
    const Sizes second{1};
    return torch::stable::sum(of, torch::headeronly::IntHeaderOnlyArrayRef(second));
}

// Contiguous and aligned to 16 bytes, copied if it is not.
inline Tensor ready(const Tensor& of) {
    Tensor found = torch::stable::contiguous(of);
    return reinterpret_cast<std::uintptr_t>(found.const_data_ptr()) % 16 ? torch::stable::clone(found) : found;
}

[[noreturn]] inline void refuse(const std::string& text) { throw std::runtime_error("equitune: " + text); }

// Torch's current stream of a GPU, by the function that libtorch's build for CUDA has.
inline void* stream_of(int device) {
    using Function = AOTITorchError (*)(std::int32_t, void**);
    static const auto function = [] {
        void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
        return reinterpret_cast<Function>(dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }();
    if (function == nullptr) refuse("this libtorch is built without CUDA");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(function(device, &stream));
    return stream;
}

template <class Index>
bool in_range_on_host(const Index* nodes, std::int64_t edges, std::int64_t count) {
    bool found = true;
    for (std::int64_t e = 0; e < edges; ++e) found &= nodes[e] >= 0 && nodes[e] < count;
    return found;
}

// Raise an error for an index that is no node; of a GPU's indices nothing is known here.
inline void check_range(const char* name, const Tensor& nodes, std::int64_t count) {
    if (!nodes.is_cpu()) return;
    const bool wide = nodes.scalar_type() == ScalarType::Long;
    const void* at = nodes.const_data_ptr();
    const bool fits = wide ? in_range_on_host(static_cast<const std::int64_t*>(at), nodes.numel(), count)
                           : in_range_on_host(static_cast<const std::int32_t*>(at), nodes.numel(), count);
    if (!fits) refuse(std::string(name) + " has an index outside 0.." + std::to_string(count - 1));
}

// Whole numbers 0..count-1, int32, on the device of a tensor. (aten::arange takes Scalars.)
inline Tensor numbers(std::int64_t count, const Tensor& like) {
    Tensor steps = torch::stable::fill_(torch::stable::new_empty(like, Sizes{count}, ScalarType::Int), 1);
    Tensor first = torch::stable::narrow(steps, 0, 0, 1);
    torch::stable::zero_(first);
    std::array<StableIValue, 3> stack{detail::from(steps), detail::from(std::int64_t{0}),
                                      detail::from(std::optional<ScalarType>(ScalarType::Int))};
    dispatch("aten::cumsum", "", stack);
    return detail::to<Tensor>(stack[0]);
}

// A GPU with at most this many nodes takes the longest spans first, as kernelgen.runtime.graph.
constexpr std::int64_t LONGEST_FIRST = 8192;

// Spans [count, 3] and permutation [edges] of edges by one end, as kernelgen.runtime.graph.order_by.
inline std::pair<Tensor, Tensor> order_by(const Tensor& nodes, std::int64_t count) {
    std::array<StableIValue, 4> sort{detail::from(torch::stable::to(nodes, ScalarType::Int)),
                                     detail::from(std::optional<bool>(true)), detail::from(std::int64_t{-1}),
                                     detail::from(false)};
    dispatch("aten::sort", "stable", sort);
    const Tensor sorted = detail::to<Tensor>(sort[0]), places = detail::to<Tensor>(sort[1]);
    Tensor bounds = numbers(count + 1, nodes);
    std::array<StableIValue, 6> search{detail::from(sorted),
                                       detail::from(bounds),
                                       detail::from(true),
                                       detail::from(false),
                                       detail::from(std::optional<std::string>()),
                                       detail::from(std::optional<Tensor>())};
    dispatch("aten::searchsorted", "Tensor", search);
    Tensor ends = detail::to<Tensor>(search[0]);
    Tensor spans = torch::stable::new_empty(nodes, Sizes{count, 3}, ScalarType::Int);
    const std::array<Tensor, 3> columns{torch::stable::narrow(bounds, 0, 0, count),
                                        torch::stable::narrow(ends, 0, 0, count),
                                        torch::stable::narrow(ends, 0, 1, count)};
    for (std::int64_t i = 0; i < 3; ++i) {
        Tensor column = torch::stable::select(spans, 1, i);
        torch::stable::copy_(column, columns[i]);
    }
    if (nodes.is_cuda() && count <= LONGEST_FIRST) {
        std::array<StableIValue, 5> lengths{detail::from(ends), detail::from(std::int64_t{1}),
                                            detail::from(std::int64_t{-1}), detail::from(std::optional<Tensor>()),
                                            detail::from(std::optional<Tensor>())};
        dispatch("aten::diff", "", lengths);
        std::array<StableIValue, 4> least{lengths[0], detail::from(true), detail::from(std::int64_t{-1}),
                                          detail::from(true)};
        dispatch("aten::argsort", "stable", least);
        spans = rows_at(spans, detail::to<Tensor>(least[0]));
    }
    return {spans, torch::stable::to(places, ScalarType::Int)};
}

}  // namespace equitune
