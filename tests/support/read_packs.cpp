// Opens packs, each alone, and picks an operator of each family: a test's. It prints "loaded N" (operators) of each, or
// the reason. With --together all are packs of one process.
//
//     read_packs [--together] PACK...
#include <iostream>

#include "pack.hpp"

int main(int count, char** given) {
    const bool together = count > 1 && std::string(given[1]) == "--together";
    equitune::Packs shared;
    for (int at = together ? 2 : 1; at < count; ++at) {
        try {
            equitune::Packs alone;
            (together ? shared : alone).load(given[at]);
            const equitune::Pack pack(given[at]);
            for (const auto& made : pack.operators)
                for (const std::int64_t edges : {0L, 1L, 40L, 1L << 40}) {
                    const equitune::Operator& found = (together ? shared : alone).find((*made->facts)["text"].text);
                    if (found.of_size(edges, 7).facts == nullptr) throw std::runtime_error("an operator without facts");
                }
            std::cout << "loaded " << pack.operators.size() << std::endl;
        } catch (const std::exception& error) {
            std::cout << error.what() << std::endl;
        }
    }
}
