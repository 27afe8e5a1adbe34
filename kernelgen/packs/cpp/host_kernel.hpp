// Kernels for the host: shared objects in memory, loaded without a folder that can be written.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "file.hpp"
#include "json.hpp"

namespace equitune {

// Pointers in the order of kernelgen.kernels.spec.BUFFERS, numbers of edges, of nodes read and written, threads.
constexpr int BUFFERS = 16;
using P = void*;
using HostFunction = void (*)(P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, long long, long long, long long, int);

// Makes the OpenMP library that torch uses visible to kernels, which do not link one of their own.
inline void share_openmp() {
    static const bool done = [] {
        dl_iterate_phdr(
            [](dl_phdr_info* info, std::size_t, void*) {
                if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, "libgomp") == nullptr) return 0;
                dlopen(info->dlpi_name, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
                return 1;
            },
            nullptr);
        return true;
    }();
    (void)done;
}

inline HostFunction load_host(const std::string& data, const std::string& entry) {
    share_openmp();
    // The descriptor stays open: dlopen knows a library by its name, and a closed one's number would come again.
    const int file = memfd_create("equitune-kernel", MFD_CLOEXEC);
    if (file < 0) throw std::runtime_error(std::string("equitune: memfd_create: ") + std::strerror(errno));
    for (std::size_t done = 0; done < data.size();) {
        const ssize_t count = write(file, data.data() + done, data.size() - done);
        if (count <= 0) throw std::runtime_error(std::string("equitune: write: ") + std::strerror(errno));
        done += count;
    }
    void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    void* function = library == nullptr ? nullptr : dlsym(library, entry.c_str());
    if (function == nullptr) throw std::runtime_error(std::string("equitune: a kernel cannot be loaded: ") + dlerror());
    return reinterpret_cast<HostFunction>(function);
}

// The processor features of a pack that this machine lacks; empty if it has all.
inline std::string missing_features(const std::string& machine, const Json& features) {
    utsname here{};
    uname(&here);
    if (machine != here.machine) return machine + " (it is " + here.machine + ")";
    const std::string facts = bytes_of("/proc/cpuinfo").value_or("");
    const std::size_t begin = std::min(facts.find("\nflags"), facts.find("\nFeatures"));
    std::string known;
    if (begin != std::string::npos) known = facts.substr(begin + 1, facts.find('\n', begin + 1) - begin - 1) + " ";
    std::string missing;
    for (const Json& feature : features.list)
        if (known.find(" " + feature.text + " ") == std::string::npos) missing += (missing.empty() ? "" : ", ") + feature.text;
    return missing;
}

}  // namespace equitune
