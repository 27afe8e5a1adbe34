// Reads files, and says whether compiled code is whole. By the C library alone: streams of C++ share tables with the
// program's own C++ library, and fail where a compiler links another one statically.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

namespace equitune {

// All bytes of a file; nothing if it cannot be read, or is a pipe or a device, which may never end.
inline std::optional<std::string> bytes_of(const std::string& path) {
    const int opened = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (opened < 0) return std::nullopt;
    struct stat status {};
    std::FILE* const file = fstat(opened, &status) == 0 && S_ISREG(status.st_mode) ? fdopen(opened, "rb") : nullptr;
    if (file == nullptr) {
        close(opened);
        return std::nullopt;
    }
    std::string bytes;
    char part[1 << 16];
    for (std::size_t size; (size = std::fread(part, 1, sizeof part, file)) > 0;) bytes.append(part, size);
    const bool failed = std::ferror(file) != 0;
    std::fclose(file);
    if (failed) return std::nullopt;
    return bytes;
}

// A number of `size` bytes, little-endian; 0 beyond the end.
inline std::uint64_t number_at(const std::string& bytes, std::uint64_t at, int size) {
    std::uint64_t value = 0;
    if (at > bytes.size() || bytes.size() - at < static_cast<std::uint64_t>(size)) return 0;
    for (int i = size - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
    return value;
}

// Whether an ELF file has its tables and all that they name, as kernelgen.compile.job: a torn one may end the process.
inline bool is_whole(const std::string& elf) {
    if (elf.compare(0, 6, "\x7f" "ELF\x02\x01") != 0)
        return elf.compare(0, 4, "\x7f" "ELF") == 0;  // 32 bits or big-endian: not checked further
    const auto inside = [&](std::uint64_t at, std::uint64_t size) {
        return at <= elf.size() && size <= elf.size() - at;
    };
    const std::uint64_t segments_at = number_at(elf, 0x20, 8), sections_at = number_at(elf, 0x28, 8);
    const std::uint64_t segment_size = number_at(elf, 0x36, 2), segments = number_at(elf, 0x38, 2);
    const std::uint64_t section_size = number_at(elf, 0x3A, 2), sections = number_at(elf, 0x3C, 2);
    constexpr std::uint64_t NO_BITS = 8;
    bool whole = sections_at > 0 && section_size >= 0x40 && (segments == 0 || segment_size >= 0x38) &&
                 inside(sections_at, section_size * sections) && inside(segments_at, segment_size * segments);
    for (std::uint64_t i = 0, at = sections_at; whole && i < sections; ++i, at += section_size)
        whole = number_at(elf, at + 4, 4) == NO_BITS || inside(number_at(elf, at + 24, 8), number_at(elf, at + 32, 8));
    for (std::uint64_t i = 0, at = segments_at; whole && i < segments; ++i, at += segment_size)
        whole = inside(number_at(elf, at + 8, 8), number_at(elf, at + 32, 8));
    return whole;
}

}  // namespace equitune
