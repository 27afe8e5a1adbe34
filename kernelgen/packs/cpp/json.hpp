// A reader for the index of a pack: JSON without surrogate pairs, which the writer does not need.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace equitune {

struct Json {
    enum class Kind { null, boolean, number, text, list, table } kind = Kind::null;
    double number = 0;   // also of a boolean; exact for integers below 2^53
    bool whole = false;  // a number that is written without a point and an exponent
    std::string text;
    std::vector<Json> list;
    std::map<std::string, Json> table;

    bool has(const std::string& name) const { return table.count(name) != 0; }
    const Json& operator[](const std::string& name) const {
        const auto found = table.find(name);
        if (found == table.end()) throw std::runtime_error("equitune: the pack's index lacks '" + name + "'");
        return found->second;
    }
    bool is_integer() const { return whole && std::abs(number) <= MOST; }
    std::int64_t integer() const {
        if (!is_integer()) throw std::runtime_error("equitune: the pack's index lacks a whole number");
        return static_cast<std::int64_t>(number);
    }
    bool is_true() const { return number != 0; }
    bool operator==(const Json& other) const {
        return kind == other.kind && number == other.number && text == other.text && list == other.list &&
               table == other.table;
    }

    static constexpr double MOST = 9007199254740991;  // the numbers beyond it are not exact
};

class JsonReader {
public:
    explicit JsonReader(const std::string& text) : at(text.c_str()), end(at + text.size()) {}

    // As kernelgen.files. A text that nests deeper would overflow the stack.
    static constexpr int MOST_DEPTH = 100;

    Json read() {
        Json value = any(0);
        skip();
        if (at != end) fail();
        return value;
    }

private:
    const char* at;
    const char* end;

    [[noreturn]] void fail() const { throw std::runtime_error("equitune: the pack's index is no JSON"); }
    void skip() {
        while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
    }
    char next() {
        skip();
        if (at == end) fail();
        return *at;
    }
    void take(char wanted) {
        if (next() != wanted) fail();
        ++at;
    }
    bool taken(char wanted) {
        if (next() != wanted) return false;
        ++at;
        return true;
    }

    Json any(int depth) {
        if (depth > MOST_DEPTH) fail();
        Json value;
        const char first = next();
        if (first == '{') {
            value.kind = Json::Kind::table;
            take('{');
            if (taken('}')) return value;
            do {
                std::string name = string();
                take(':');
                if (!value.table.emplace(std::move(name), any(depth + 1)).second) fail();
            } while (taken(','));
            take('}');
        } else if (first == '[') {
            value.kind = Json::Kind::list;
            take('[');
            if (taken(']')) return value;
            do value.list.push_back(any(depth + 1));
            while (taken(','));
            take(']');
        } else if (first == '"') {
            value.kind = Json::Kind::text;
            value.text = string();
        } else if (word("true")) {
            value.kind = Json::Kind::boolean;
            value.number = 1;
        } else if (word("false")) {
            value.kind = Json::Kind::boolean;
        } else if (!word("null")) {
            value.kind = Json::Kind::number;
            const char* const begin = at;
            value.number = digits();
            value.whole = std::all_of(begin, at, [](char c) { return c == '-' || ('0' <= c && c <= '9'); });
        }
        return value;
    }

    bool word(const char* wanted) {
        const std::string text = wanted;
        if (static_cast<std::size_t>(end - at) < text.size() || text.compare(0, text.size(), at, text.size()) != 0)
            return false;
        at += text.size();
        return true;
    }

    // Not strtod, which takes the decimal point of the program's locale. Without words such as nan, which are no JSON.
    double digits() {
        double number = 0;
        const auto [last, error] = std::from_chars(at, end, number);
        if (error != std::errc() || !std::isfinite(number)) fail();
        at = last;
        return number;
    }

    std::string string() {
        take('"');
        std::string text;
        while (at < end && *at != '"') {
            if (*at != '\\') {
                text += *at++;
                continue;
            }
            if (end - at < 2) fail();
            const char code = at[1];
            at += 2;
            switch (code) {
                case 'n': text += '\n'; break;
                case 't': text += '\t'; break;
                case 'r': text += '\r'; break;
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case 'u': text += code_point(); break;
                case '"': case '\\': case '/': text += code; break;
                default: fail();
            }
        }
        take('"');
        return text;
    }

    std::string code_point() {
        if (end - at < 4) fail();
        unsigned code = 0;
        if (std::from_chars(at, at + 4, code, 16).ptr != at + 4) fail();
        at += 4;
        if (code < 0x80) return {static_cast<char>(code)};
        if (code < 0x800) return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
        return {static_cast<char>(0xE0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 0x3F)),
                static_cast<char>(0x80 | (code & 0x3F))};
    }
};

}  // namespace equitune
