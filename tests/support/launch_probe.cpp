// Launches every kernel of a pack once for each of some sizes, through the driver that the loader finds: a test's.
//
//     launch_probe PACK MAJOR MINOR EDGES IN OUT [EDGES IN OUT]...
#include <iostream>

#include "pack.hpp"

int main(int count, char** given) {
    try {
        equitune::Pack pack(given[1]);
        std::vector<std::string> targets;
        int ptx_for = 0;
        for (const auto& kernel : pack.kernels) {
            targets.push_back(kernel->facts["target"].text);
            ptx_for = std::max(ptx_for, kernel->ptx_for());
        }
        const std::string target = equitune::best_target(targets, std::atoi(given[2]), std::atoi(given[3]), ptx_for);
        std::cout << "target " << target << std::endl;
        for (std::size_t i = 0; i < pack.kernels.size(); ++i) {
            equitune::Kernel& kernel = *pack.kernels[i];
            if (targets[i] != target || !kernel.facts.has("launch")) continue;
            for (int at = 4; at + 2 < count; at += 3) {
                std::array<void*, equitune::BUFFERS> pointers{};
                pointers[0] = reinterpret_cast<void*>(0x1000);
                std::cout << "kernel " << i << std::endl;
                kernel.on_gpu(0, reinterpret_cast<void*>(0x77), pointers, std::atoll(given[at]), std::atoll(given[at + 1]),
                              std::atoll(given[at + 2]), {});
            }
        }
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
