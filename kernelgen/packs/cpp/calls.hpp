// Runs the calls of operators: allocates outputs, orders edges where a kernel needs it, launches kernels.
// What to do is data of the pack, written by kernelgen/packs/write.py.
#pragma once

#include <algorithm>
#include <string>

#include "pack.hpp"
#include "torch_calls.hpp"

namespace equitune {

inline const std::string SLOTS = "xywg";

// Operands x, tx, y, ty, w, tw, g, tg; the edges (none for a plain product) and their order.
struct Given {
    std::array<Maybe, 8> operands;
    Maybe sender{}, receiver{}, spans{}, perm{}, sender_spans{}, sender_perm{};
    std::int64_t edges = 0, num_in = 0, num_out = 0;
};

using Found = std::array<Maybe, 4>;  // outputs by slot

// Of some kernels the one for indices of a dtype on a GPU.
inline Kernel* kernel_for(const Kernels& kernels, const std::string& index, int device) {
    const CudaDriver& driver = CudaDriver::get();
    const int major = driver.attribute(CudaDriver::MAJOR, device), minor = driver.attribute(CudaDriver::MINOR, device);
    std::vector<std::string> targets;
    int ptx_for = 0;
    for (const auto& [target, kernel] : kernels) {
        if (target.compare(0, index.size() + 1, index + " ") != 0) continue;
        targets.push_back(target.substr(index.size() + 1));
        if (targets.back() == "ptx") ptx_for = kernel->ptx_for();
    }
    const std::string target = best_target(targets, major, minor, ptx_for);
    if (target.empty())
        refuse("the pack has no kernel for indices of " + index + " on sm_" + std::to_string(10 * major + minor) +
               "; write it with --arch and --index");
    return kernels.at(index + " " + target);
}

class CallRunner {
public:
    CallRunner(const Part& part, const Given& given)
        : part(part), facts(*part.facts), given(given), first(*given.operands[0]) {}

    Found run() {
        Found found;
        if (given.edges == 0 || facts["writes"].table.empty()) {
            for (const char slot : facts["outputs"].text) found[place(slot)] = zeros(slot);
            return found;
        }
        const bool gathers = facts["gathers"].is_true();
        found = launch(gathers);
        Maybe& y = found[place('y')];
        if (facts["partial_y"].integer() > 0 && y) y = sum_of_second(*y);
        if (gathers) {
            sum_to_nodes(found, 'x', given.sender);
            sum_to_nodes(found, 'g', given.receiver);
        }
        for (const char slot : facts["outputs"].text)
            if (!found[place(slot)]) found[place(slot)] = zeros(slot);
        return found;
    }

private:
    const Part& part;
    const Json& facts;
    const Given& given;
    const Tensor first;

    static constexpr std::size_t MATRIX = 5;  // of a fused convolution, in the place of tangents of w
    static constexpr std::size_t MARKS = 9;   // in the place of an output y

    static Sizes sizes_of(const Json& list) {
        Sizes sizes;
        for (const Json& size : list.list) sizes.push_back(size.integer());
        return sizes;
    }

    static std::size_t place(char slot) { return SLOTS.find(slot); }

    std::int64_t width(char slot) const { return facts["widths"][std::string(1, slot)].integer(); }

    std::int64_t rows(char slot, bool by_edge) const {
        if (slot == 'x' && !by_edge) return given.num_in;
        if (slot == 'g' && !by_edge) return given.num_out;
        return given.edges;
    }

    Sizes shape(char slot, bool by_edge = false) const {
        if (slot == 'w' && facts["weights"].kind == Json::Kind::list) {  // shared by all rows
            Sizes sizes = sizes_of(facts["weights"]);
            if (sizes.front() < 0) sizes.front() = needed(given.operands[4], "w").size(0);
            return sizes;
        }
        return {rows(slot, by_edge), width(slot)};
    }

    // A tensor that the pack's description of the call needs: one for another op may ask for what this one lacks.
    static const Tensor& needed(const Maybe& tensor, const std::string& name) {
        if (!tensor) refuse(name + " is missing");
        return *tensor;
    }

    Tensor zeros(char slot) const { return torch::stable::new_zeros(first, shape(slot)); }

    // The operand of a buffer, checked; by edge if the kernel is a plain one inside of a convolution.
    Tensor operand(std::size_t at, bool gathers) const {
        const std::string name = std::string(at % 2 ? "t" : "") + SLOTS[at / 2];
        const Tensor& tensor = needed(given.operands[at], name);
        const Sizes wanted = at == MATRIX && facts.has("matrix") ? sizes_of(facts["matrix"]) : shape(SLOTS[at / 2]);
        const auto sizes = tensor.sizes();
        const bool fits = sizes.size() == wanted.size() && std::equal(wanted.begin(), wanted.end(), sizes.begin());
        const auto dtype = facts["dtype"].text == "float64" ? ScalarType::Double : ScalarType::Float;
        if (!fits || tensor.scalar_type() != dtype || tensor.is_cuda() != first.is_cuda())
            refuse(name + " does not fit the operator: expected " + facts["dtype"].text + " of " + text(wanted) +
                   ", given " + text(Sizes(sizes.begin(), sizes.end())));
        const char slot = SLOTS[at / 2];
        if (gathers && slot == 'x') return rows_at(tensor, needed(given.sender, "sender"));
        if (gathers && slot == 'g') return rows_at(tensor, needed(given.receiver, "receiver"));
        return ready(tensor);
    }

    static std::string text(const Sizes& sizes) {
        std::string found = "[";
        for (const auto size : sizes) found += (found.size() > 1 ? ", " : "") + std::to_string(size);
        return found + "]";
    }

    Found launch(bool gathers) const {
        std::array<void*, BUFFERS> pointers{};
        std::vector<Tensor> kept;  // until the kernel has been launched
        for (const Json& at : facts["reads"].list) {
            kept.push_back(operand(at.integer(), gathers));
            pointers[at.integer()] = const_cast<void*>(kept.back().const_data_ptr());
        }
        std::string index = "int64";
        if (given.sender && !gathers) {
            kept.push_back(torch::stable::contiguous(*given.sender));
            pointers[12] = const_cast<void*>(kept.back().const_data_ptr());
            index = given.sender->scalar_type() == ScalarType::Int ? "int32" : "int64";
            if (given.receiver) {
                kept.push_back(torch::stable::contiguous(*given.receiver));
                pointers[13] = const_cast<void*>(kept.back().const_data_ptr());
            }
        }
        add_order(pointers, kept);
        Found found;
        for (const auto& [slot, rule] : facts["writes"].table) {
            Sizes sizes = shape(slot[0], gathers);
            if (slot == "y" && facts["partial_y"].integer() > 0) sizes.insert(sizes.begin() + 1, facts["partial_y"].integer());
            const bool zeroed = rule.text == "zero";
            const Tensor out = zeroed ? torch::stable::new_zeros(first, sizes) : torch::stable::new_empty(first, sizes);
            found[place(slot[0])] = out;
            pointers[8 + place(slot[0])] = out.mutable_data_ptr();
        }
        if (facts.has("marks") && facts["marks"].integer() > 0) {
            kept.push_back(torch::stable::new_zeros(first, Sizes{facts["marks"].integer(), given.num_out}, ScalarType::Int));
            pointers[MARKS] = kept.back().mutable_data_ptr();
        }
        const std::int64_t of_task = facts["task_nodes"].integer();
        const std::int64_t num_in = of_task ? of_task : gathers ? given.edges : given.num_in;
        run_kernel(index, pointers, num_in, gathers ? given.edges : given.num_out);
        return found;
    }

    // Spans and permutation of the edges by the nodes that the kernel owns.
    void add_order(std::array<void*, BUFFERS>& pointers, std::vector<Tensor>& kept) const {
        const std::string& order = facts["order"].text;
        if (!part.permuted.empty() && given.perm) {
            kept.push_back(torch::stable::contiguous(*given.perm));
            pointers[15] = const_cast<void*>(kept.back().const_data_ptr());
        }
        if (order.empty() || order == "given") return;
        const bool by_sender = order == "sender";
        Maybe spans = by_sender ? given.sender_spans : given.spans;
        Maybe perm = by_sender ? given.sender_perm : given.perm;
        if (!spans || order == "element") {
            const bool by_element = order == "element";
            const Tensor& nodes = by_sender || by_element ? needed(given.sender, "sender") : needed(given.receiver, "receiver");
            const auto [a, b] = order_by(nodes, by_element  ? needed(given.operands[4], "w").size(0)
                                                : by_sender ? given.num_in
                                                            : given.num_out);
            spans = a;
            perm = b;
        }
        kept.push_back(torch::stable::contiguous(*spans));
        pointers[14] = const_cast<void*>(kept.back().const_data_ptr());
        if (perm) {
            kept.push_back(torch::stable::contiguous(*perm));
            pointers[15] = const_cast<void*>(kept.back().const_data_ptr());
        }
    }

    void sum_to_nodes(Found& found, char slot, const Maybe& index) const {
        auto& out = found[place(slot)];
        if (out) out = summed_at(*out, needed(index, "an end of the edges"), shape(slot));
    }

    // The kernels to take: those by receiver where the order is known.
    const Kernels& kernels() const { return part.permuted.empty() || !given.perm ? part.kernels : part.permuted; }

    void run_kernel(const std::string& index, const std::array<void*, BUFFERS>& p, std::int64_t num_in,
                    std::int64_t num_out) const {
        if (!first.is_cpu()) return run_on_gpu(index, p, num_in, num_out);
        const auto known = part.kernels.find(index + " cpu");
        if (known == part.kernels.end())
            refuse("the pack has no kernel for indices of " + index + " on the CPU; write it with --index " + index);
        const Json& rule = known->second->facts["threads"];
        const std::int64_t fixed = rule["fixed"].integer(), rows = rule["rows_of_each"].integer();
        const std::int64_t asked = fixed ? fixed : 1 + given.edges / rows;
        const int threads = static_cast<int>(std::min<std::int64_t>(torch::stable::get_num_threads(), asked));
        known->second->of_host()(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13],
                                 p[14], p[15], given.edges, num_in, num_out, threads);
    }

    void run_on_gpu(const std::string& index, const std::array<void*, BUFFERS>& pointers, std::int64_t num_in,
                    std::int64_t num_out) const {
        const int device = first.get_device_index();
        const torch::stable::accelerator::DeviceGuard guard(device);
        // Flags by which a kernel's blocks wait for its zeros, cleared before each launch; and the launch's number.
        std::vector<std::uint64_t> zeros;
        Tensor flags;
        if (has_inside()) {
            flags = torch::stable::new_zeros(first, Sizes{FLAGS}, ScalarType::Long);
            zeros = {reinterpret_cast<std::uint64_t>(flags.const_data_ptr()), 1};
        }
        kernel_for(kernels(), index, device)->on_gpu(device, stream_of(device), pointers, given.edges, num_in, num_out, zeros);
    }

    // Of 8 bytes: 33 lines of 128 bytes, as kernelgen.runtime.kernel.
    static constexpr std::int64_t FLAGS = 33 * 128 / 8;

    bool has_inside() const {
        for (const auto& [slot, rule] : facts["writes"].table)
            if (rule.text == "inside") return true;
        return false;
    }
};

// What a pack has for a call; an error if it has nothing.
inline const std::vector<Part>& parts_of(const Operator& op, const std::string& name) {
    const auto call = op.calls.find(name);
    if (call == op.calls.end())
        refuse("the pack has no kernels for " + name + " of " + (*op.facts)["text"].text.substr(0, 300) +
               "; write it again from this model's package");
    return call->second;
}

// A kernel of rows on a GPU: it takes its inputs, of which the first has the rows, the result [rows, width], the number of
// rows and the width of the first.
inline Tensor run_rows(const Operator& op, const std::string& name, const std::vector<Tensor>& inputs, std::int64_t width) {
    const std::int64_t rows = inputs[0].size(0);
    const Tensor out = torch::stable::new_empty(inputs[0], Sizes{rows, width});
    if (rows == 0) return out;
    if (!out.is_cuda()) refuse(name + " is for GPUs alone");
    std::vector<Tensor> kept;
    std::vector<std::uint64_t> arguments;
    for (const Tensor& input : inputs) {
        kept.push_back(ready(input));
        arguments.push_back(reinterpret_cast<std::uint64_t>(kept.back().const_data_ptr()));
    }
    arguments.push_back(reinterpret_cast<std::uint64_t>(out.mutable_data_ptr()));
    arguments.push_back(static_cast<std::uint64_t>(rows));
    arguments.push_back(static_cast<std::uint64_t>(inputs[0].size(1)));
    const int device = out.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    Kernel* const kernel = kernel_for(parts_of(op, name).front().kernels, "int64", device);
    kernel->on_gpu(device, stream_of(device), arguments, rows, rows, rows);
    return out;
}

// A call's parts one after the other; each computes other outputs.
inline Found run_call(const Operator& op, const std::string& name, const Given& given) {
    Found found;
    for (const Part& part : parts_of(op, name)) {
        const Found of_part = CallRunner(part, given).run();
        for (std::size_t slot = 0; slot < found.size(); ++slot)
            if (of_part[slot]) found[slot] = of_part[slot];
    }
    return found;
}

}  // namespace equitune
