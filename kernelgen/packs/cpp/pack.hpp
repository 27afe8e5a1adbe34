// Packs: files of compiled kernels (kernelgen/compile/pack_file.py has the format), and the operators in them.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_kernel.hpp"
#include "file.hpp"
#include "host_kernel.hpp"
#include "json.hpp"
#include "rules.hpp"

namespace equitune {

// A kernel of a pack. of_host: its function, loaded at first use.
class Kernel {
public:
    Kernel(const Json& facts, std::string data) : facts(facts), data(std::move(data)) {}

    const Json facts;

    int ptx_for() const { return ptx_number(data); }

    HostFunction of_host() {
        std::lock_guard<std::mutex> guard(lock);
        if (function == nullptr) function = load_host(data, facts["entry"].text);
        return function;
    }

    // Launch on a device's stream; ``zeros`` are more arguments of kernels that zero their outputs.
    void on_gpu(int device, void* stream, const std::array<void*, BUFFERS>& pointers, std::int64_t edges,
                std::int64_t num_in, std::int64_t num_out, const std::vector<std::uint64_t>& zeros) {
        std::vector<std::uint64_t> arguments;
        for (void* const pointer : pointers) arguments.push_back(reinterpret_cast<std::uint64_t>(pointer));
        for (const std::int64_t size : {edges, num_in, num_out}) arguments.push_back(static_cast<std::uint64_t>(size));
        arguments.insert(arguments.end(), zeros.begin(), zeros.end());
        on_gpu(device, stream, arguments, edges, num_in, num_out);
    }

    // The same with all arguments given, each of 8 bytes.
    void on_gpu(int device, void* stream, std::vector<std::uint64_t>& arguments, std::int64_t edges, std::int64_t num_in,
                std::int64_t num_out) {
        const int units = CudaDriver::get().attribute(CudaDriver::UNITS, device);
        const Json& rule = facts["launch"];
        Geometry shape = geometry_of(rule, edges, num_in, num_out, units);
        if (shape.blocks > 0 && rule.has("whole_waves") && rule["whole_waves"].is_true()) {
            const int held = cuda.held(data, facts["entry"].text, device, shape);
            shape = geometry_of(rule, edges, num_in, num_out, units, held);
        }
        if (shape.blocks > 0) cuda.launch(data, facts["entry"].text, device, shape, stream, arguments);
    }

private:
    const std::string data;
    HostFunction function = nullptr;
    CudaCode cuda;
    std::mutex lock;
};

// Kernels by the dtype of the indices and the target, such as "int64 cpu".
using Kernels = std::unordered_map<std::string, Kernel*>;

// One launch of a call. permuted: kernels that run instead if the order of edges by receiver is known.
struct Part {
    const Json* facts;
    Kernels kernels, permuted;

    // What must be the same in all packs: all but the kernels.
    Json described() const {
        Json found = *facts;
        found.table.erase("kernels");
        found.table.erase("permuted");
        return found;
    }
};

struct Operator {
    const Json* facts;
    std::unordered_map<std::string, std::vector<Part>> calls;
    std::vector<Operator*> members;
    std::vector<std::vector<int>> classes;

    // Whether another pack says the same of this operator, but for kernels: packs of two versions may not.
    bool agrees(const Operator& other) const {
        const auto same = [](const Part& a, const Part& b) { return a.described() == b.described(); };
        bool all = (*facts)["needs"] == (*other.facts)["needs"] && classes == other.classes && texts() == other.texts();
        for (const auto& [name, parts] : other.calls)
            if (const auto known = calls.find(name); known != calls.end())
                all &= std::equal(parts.begin(), parts.end(), known->second.begin(), known->second.end(), same);
        return all;
    }

    // The calls and kernels that another pack has of the same operator, with which it agrees.
    void add(const Operator& other) {
        for (const auto& [name, parts] : other.calls) {
            auto& known = calls.emplace(name, parts).first->second;
            for (std::size_t i = 0; i < known.size(); ++i) {
                known[i].kernels.insert(parts[i].kernels.begin(), parts[i].kernels.end());
                known[i].permuted.insert(parts[i].permuted.begin(), parts[i].permuted.end());
            }
        }
    }

    // The operator for a graph: itself, or a family's member. Rounded binary logarithms, as kernelgen.problem.product.
    const Operator& of_size(std::int64_t edges, std::int64_t nodes) const {
        if (members.empty()) return *this;
        const auto half = [](double square) {
            int bits = 0;
            for (; square >= 1; square /= 2) ++bits;
            return static_cast<std::size_t>(bits / 2);
        };
        const double many = edges > 0 ? edges : 1, few = nodes > 0 ? nodes : 1;
        const auto& row = classes[std::min(half(many * many), classes.size() - 1)];
        const double ratio = static_cast<double>(static_cast<std::int64_t>(many * many / (few * few)));
        return *members[row[std::min(half(ratio), row.size() - 1)]];
    }

private:
    // Of the members.
    std::vector<std::string> texts() const {
        std::vector<std::string> found;
        for (const Operator* const member : members) found.push_back((*member->facts)["text"].text);
        return found;
    }
};

class Pack {
public:
    explicit Pack(const std::string& path) : path(path) {
        const auto read = bytes_of(path);
        if (!read) fail("cannot be read");
        const std::string& bytes = *read;
        if (bytes.size() < HEAD || bytes.compare(0, 8, "EQTNPACK") != 0) fail("is no pack of Equitune");
        if (const auto found = number_at(bytes, 8, 4); found != FORMAT)
            fail("has format " + std::to_string(found) + "; this library reads " + std::to_string(FORMAT) +
                 ": write it again");
        const std::uint64_t size = number_at(bytes, 16, 8), begin = (HEAD + size + 63) / 64 * 64;
        if (size > bytes.size() - HEAD) fail("is not whole");
        const std::string text = bytes.substr(HEAD, size);
        if (crc32(text) != number_at(bytes, 12, 4))
            fail("is damaged (its index is not what was written): write it again");
        try {
            index = JsonReader(text).read();
            Rules::check(index);
        } catch (const std::exception& error) {
            fail(std::string("is damaged (") + error.what() + "): write it again");
        }
        for (const Json& facts : index["kernels"].list) kernels.push_back(kernel(facts, bytes, begin));
        for (const Json& facts : index["operators"].list) operators.push_back(operator_of(facts));
        for (auto& made : operators)
            if (made->facts->has("members"))
                for (const Json& place : (*made->facts)["members"].list)
                    made->members.push_back(operators[place.integer()].get());
        check_processor();
    }

    Json index;
    std::vector<std::unique_ptr<Kernel>> kernels;
    std::vector<std::unique_ptr<Operator>> operators;

private:
    static constexpr std::uint64_t HEAD = 24, FORMAT = 2;
    const std::string path;

    [[noreturn]] void fail(const std::string& reason) const {
        throw std::runtime_error("equitune: " + path + " " + reason);
    }

    std::unique_ptr<Kernel> kernel(const Json& facts, const std::string& bytes, std::uint64_t begin) const {
        const std::uint64_t offset = begin + facts["offset"].integer(), size = facts["size"].integer();
        if (offset > bytes.size() || size > bytes.size() - offset) fail("is not whole");
        std::string data = bytes.substr(offset, size);
        if (crc32(data) != facts["crc32"].integer() || !(facts["target"].text == "ptx" || is_whole(data)))
            fail("is damaged (the code of a kernel is not whole): write it again");
        return std::make_unique<Kernel>(facts, std::move(data));
    }

    std::unique_ptr<Operator> operator_of(const Json& facts) const {
        auto made = std::make_unique<Operator>();
        made->facts = &facts;
        if (facts.has("classes"))
            for (const Json& row : facts["classes"].list) {
                made->classes.emplace_back();
                for (const Json& place : row.list) made->classes.back().push_back(static_cast<int>(place.integer()));
            }
        for (const auto& [name, parts] : facts["calls"].table)
            for (const Json& part : parts.list) {
                Part known{&part, {}, {}};
                for (const auto& [target, place] : part["kernels"].table)
                    known.kernels[target] = kernels[place.integer()].get();
                for (const auto& [target, place] : part["permuted"].table)
                    known.permuted[target] = kernels[place.integer()].get();
                made->calls[name].push_back(std::move(known));
            }
        return made;
    }

    void check_processor() const {
        if (index["machine"].text.empty()) return;  // without kernels for hosts
        const std::string missing = missing_features(index["machine"].text, index["features"]);
        if (!missing.empty()) fail("was made for other processors: this one lacks " + missing);
    }

    static std::uint32_t crc32(const std::string& data) {
        std::uint32_t crc = ~0u;
        for (const unsigned char byte : data) {
            crc ^= byte;
            for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1u)));
        }
        return ~crc;
    }
};

// All packs of this process: those in $EQUITUNE_PACK (separated by colons), and those given to equitune_load_pack.
class Packs {
public:
    static Packs& all() {
        static Packs packs;
        return packs;
    }

    void load(const std::string& path) {
        std::lock_guard<std::mutex> guard(lock);
        add(path);
    }

    const Operator& find(const std::string& text) {
        std::lock_guard<std::mutex> guard(lock);
        if (!started) {
            const char* given = std::getenv("EQUITUNE_PACK");
            const std::string paths = given == nullptr ? "" : given;
            while (from_environment < paths.size()) {  // goes on at a pack that could not be loaded
                const std::size_t end = std::min(paths.find(':', from_environment), paths.size());
                if (end > from_environment) add(paths.substr(from_environment, end - from_environment));
                from_environment = end + 1;
            }
            started = true;
        }
        const auto found = by_text.find(text);
        if (found == by_text.end())
            throw std::runtime_error(
                "equitune: no pack of this process has the kernels of this model; write one with 'equitune pack exported "
                "MODEL.pt2 --out FILE' and name it in EQUITUNE_PACK (the operator is " + text.substr(0, 80) + "...)");
        return *found->second;
    }

private:
    std::mutex lock;
    bool started = false;
    std::size_t from_environment = 0;  // where the next pack's name begins
    std::vector<std::unique_ptr<Pack>> packs;
    std::unordered_map<std::string, Operator*> by_text;

    void add(const std::string& path) {
        auto pack = std::make_unique<Pack>(path);
        for (const auto& made : pack->operators) {
            const auto known = by_text.find((*made->facts)["text"].text);
            if (known != by_text.end() && !known->second->agrees(*made))
                throw std::runtime_error("equitune: " + path + " runs an operator otherwise than a pack before it: " +
                                         "they are of two versions or two kinds of GPUs; name one of them, or write both " +
                                         "again. It is " + known->first.substr(0, 300));
        }
        packs.push_back(std::move(pack));
        for (const auto& made : packs.back()->operators) {
            const auto [known, fresh] = by_text.emplace((*made->facts)["text"].text, made.get());
            if (!fresh) known->second->add(*made);
        }
        for (const auto& made : packs.back()->operators)
            for (Operator*& member : made->members) member = by_text.at((*member->facts)["text"].text);
    }
};

}  // namespace equitune
