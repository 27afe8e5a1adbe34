// Reads files. By the C library alone: streams of C++ share tables with the program's own C++ library, and fail where a
// compiler links another one statically.
#pragma once

#include <cstdio>
#include <optional>
#include <string>

namespace equitune {

// All bytes of a file; nothing if it cannot be read.
inline std::optional<std::string> bytes_of(const std::string& path) {
    std::FILE* const file = std::fopen(path.c_str(), "rb");
    if (file == nullptr) return std::nullopt;
    std::string bytes;
    char part[1 << 16];
    for (std::size_t size; (size = std::fread(part, 1, sizeof part, file)) > 0;) bytes.append(part, size);
    const bool failed = std::ferror(file) != 0;
    std::fclose(file);
    if (failed) return std::nullopt;
    return bytes;
}

}  // namespace equitune
