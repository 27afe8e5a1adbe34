// Kernels for GPUs: machine code or PTX, loaded and launched through the CUDA driver, which is found at run time.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.hpp"

namespace equitune {

// CUlaunchConfig of cuda.h.
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned num_attributes;
};

// The functions of the driver that are used here, with the types of cuda.h in plain C.
class CudaDriver {
public:
    static const CudaDriver& get() {
        static const CudaDriver driver;
        return driver;
    }

    int (*library_load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned) = nullptr;
    int (*library_kernel)(void**, void*, const char*) = nullptr;
    int (*kernel_set)(int, int, void*, int) = nullptr;
    int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
    int (*device_get)(int*, int) = nullptr;
    int (*device_attribute)(int*, int, int) = nullptr;
    int (*occupancy)(int*, void*, int, std::size_t) = nullptr;
    int (*error_name)(int, const char**) = nullptr;
    int (*retain_context)(void**, int) = nullptr;
    int (*set_context)(void*) = nullptr;

    void check(int status, const std::string& what) const {
        if (status == 0) return;
        const char* name = nullptr;
        error_name(status, &name);
        throw std::runtime_error("equitune: " + what + ": " + (name == nullptr ? std::to_string(status) : name));
    }

    // An attribute of a device: multiprocessors, or major or minor number of its architecture.
    int attribute(int which, int device) const {
        int handle = 0, value = 0;
        check(device_get(&handle, device), "the device");
        check(device_attribute(&value, which, handle), "an attribute of the device");
        return value;
    }

    // Makes torch's context of a device current in this thread, whose first CUDA call this may be.
    void enter(int device) const {
        int handle = 0;
        void* context = nullptr;
        check(device_get(&handle, device), "the device");
        check(retain_context(&context, handle), "the device's context");
        check(set_context(context), "the device's context");
    }

    static constexpr int UNITS = 16, MAJOR = 75, MINOR = 76, DYNAMIC_SHARED = 8, INVALID_CONTEXT = 201;

private:
    CudaDriver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) throw std::runtime_error(std::string("equitune: the CUDA driver: ") + dlerror());
        find(library, "cuLibraryLoadData", library_load);
        find(library, "cuLibraryGetKernel", library_kernel);
        find(library, "cuKernelSetAttribute", kernel_set);
        find(library, "cuLaunchKernelEx", launch);
        find(library, "cuDeviceGet", device_get);
        find(library, "cuDeviceGetAttribute", device_attribute);
        find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", occupancy);
        find(library, "cuGetErrorName", error_name);
        find(library, "cuDevicePrimaryCtxRetain", retain_context);
        find(library, "cuCtxSetCurrent", set_context);
    }

    template <class Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr)
            throw std::runtime_error(std::string("equitune: this CUDA driver has no ") + name + "; 525 or later is needed");
    }
};

struct Geometry {
    std::int64_t blocks, threads, shared;
};

// As kernelgen.kernels.source.LaunchRule.geometry. held: blocks that a multiprocessor holds at a time, 0 if not known.
inline Geometry geometry_of(const Json& rule, std::int64_t edges, std::int64_t num_in, std::int64_t num_out, int units,
                            int held = 0) {
    const auto parts_of = [](std::int64_t count, std::int64_t each) { return each > 0 ? (count + each - 1) / each : 0; };
    std::int64_t blocks = 0;
    for (const Json& share : rule["shares"].list) {
        const std::string& count = share["count"].text;
        std::int64_t parts = count == "edges" ? edges : count == "in" ? num_in : num_out;
        if (count == "tasks") parts = parts_of(edges, num_in);
        parts *= share["times"].integer();
        for (const Json& each : share["per"].list) parts = parts_of(parts, each.integer());
        blocks += share["scale"].integer() * parts;
    }
    if (held > 0) {
        const std::int64_t scale = rule["shares"].list.front()["scale"].integer(), wave = units * held / scale * scale;
        if (wave > 0) blocks = parts_of(blocks, wave) * wave;
    }
    blocks += rule["fixed"].integer();
    const std::int64_t most = rule["most_of_unit"].integer() * units;
    return {most ? std::min(blocks, most) : blocks, rule["threads"].integer(), rule["shared"].integer()};
}

// The architecture that PTX is for, such as 90; 0 for other code.
inline int ptx_number(const std::string& code) {
    const std::string before = ".target sm_";
    const std::size_t at = code.compare(0, 4, "\x7f" "ELF") == 0 ? std::string::npos : code.find(before);
    return at == std::string::npos ? 0 : std::atoi(code.c_str() + at + before.size());
}

// The target for a device of an architecture, such as 8 and 9: its own, an older one of the same major number, PTX (which
// is for architecture `ptx_for` and later ones). Empty if there is none.
inline std::string best_target(const std::vector<std::string>& targets, int major, int minor, int ptx_for) {
    int best = -1;
    bool ptx = false;
    for (const std::string& target : targets) {
        if (target == "ptx") ptx = ptx_for <= 10 * major + minor;
        if (target.compare(0, 3, "sm_") != 0) continue;
        const int number = std::atoi(target.c_str() + 3);
        if (number / 10 == major && number % 10 <= minor) best = std::max(best, number);
    }
    return best >= 0 ? "sm_" + std::to_string(best) : ptx ? "ptx" : "";
}

// One kernel's code, loaded at its first launch; the driver brings it to each device that launches it.
class CudaCode {
public:
    // arguments: 8 bytes each, in the order of the kernel's.
    void launch(const std::string& code, const std::string& entry, int device, const Geometry& shape, void* stream,
                std::vector<std::uint64_t>& arguments) {
        const CudaDriver& driver = CudaDriver::get();
        void* const kernel = prepared(driver, code, entry, device, shape.shared);
        std::size_t size = arguments.size() * sizeof(std::uint64_t);
        // CU_LAUNCH_PARAM_BUFFER_POINTER, the block, CU_LAUNCH_PARAM_BUFFER_SIZE, its size, CU_LAUNCH_PARAM_END
        void* extra[] = {reinterpret_cast<void*>(1), arguments.data(), reinterpret_cast<void*>(2), &size, nullptr};
        const LaunchConfig config{{static_cast<unsigned>(shape.blocks), 1, 1},
                                  {static_cast<unsigned>(shape.threads), 1, 1},
                                  static_cast<unsigned>(shape.shared), stream, nullptr, 0};
        int status = driver.launch(&config, kernel, nullptr, extra);
        if (status == CudaDriver::INVALID_CONTEXT) {
            driver.enter(device);
            status = driver.launch(&config, kernel, nullptr, extra);
        }
        driver.check(status, "a launch of " + std::to_string(shape.blocks) + " blocks of " + std::to_string(shape.threads));
    }

    // Blocks that a multiprocessor of a device holds at a time, asked once; 0 if the driver does not say.
    int held(const std::string& code, const std::string& entry, int device, const Geometry& shape) {
        const CudaDriver& driver = CudaDriver::get();
        void* const loaded = prepared(driver, code, entry, device, shape.shared);
        std::lock_guard<std::mutex> guard(lock);
        if (const auto known = held_by.find(device); known != held_by.end()) return known->second;
        int count = 0;
        const auto ask = [&] {
            return driver.occupancy(&count, loaded, static_cast<int>(shape.threads), static_cast<std::size_t>(shape.shared));
        };
        int status = ask();
        if (status == CudaDriver::INVALID_CONTEXT) {
            driver.enter(device);
            status = ask();
        }
        return held_by[device] = status == 0 ? count : 0;
    }

private:
    std::mutex lock;
    void* kernel = nullptr;
    std::map<int, int> held_by;
    std::map<int, std::int64_t> allowed;  // bytes of shared memory by device

    void* prepared(const CudaDriver& driver, const std::string& code, const std::string& entry, int device,
                   std::int64_t shared) {
        constexpr std::int64_t WITHOUT_ASKING = 48 * 1024;
        std::lock_guard<std::mutex> guard(lock);
        if (kernel == nullptr) {
            void* library = nullptr;
            // A string's data ends with a zero byte, as PTX must.
            driver.check(driver.library_load(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                         "a kernel cannot be loaded");
            driver.check(driver.library_kernel(&kernel, library, entry.c_str()), entry);
        }
        if (shared > WITHOUT_ASKING && allowed[device] < shared) {
            int handle = 0;
            driver.check(driver.device_get(&handle, device), "the device");
            driver.check(driver.kernel_set(CudaDriver::DYNAMIC_SHARED, static_cast<int>(shared), kernel, handle),
                         std::to_string(shared) + " bytes of shared memory a block");
            allowed[device] = shared;
        }
        return kernel;
    }
};

}  // namespace equitune
