// A reader for the index of a pack: JSON without surrogate pairs, which the writer does not need.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace equitune {

struct Json {
    enum class Kind { null, boolean, number, text, list, table } kind = Kind::null;
    double number = 0;  // also of a boolean; exact for integers up to 2^53
    std::string text;
    std::vector<Json> list;
    std::map<std::string, Json> table;

    bool has(const std::string& name) const { return table.count(name) != 0; }
    const Json& operator[](const std::string& name) const {
        const auto found = table.find(name);
        if (found == table.end()) throw std::runtime_error("equitune: the pack's index lacks '" + name + "'");
        return found->second;
    }
    std::int64_t integer() const { return static_cast<std::int64_t>(number); }
    bool is_true() const { return number != 0; }
};

class JsonReader {
public:
    explicit JsonReader(const std::string& text) : at(text.c_str()), end(at + text.size()) {}

    Json read() {
        Json value = any();
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

    Json any() {
        Json value;
        const char first = next();
        if (first == '{') {
            value.kind = Json::Kind::table;
            take('{');
            if (taken('}')) return value;
            do {
                std::string name = string();
                take(':');
                value.table.emplace(std::move(name), any());
            } while (taken(','));
            take('}');
        } else if (first == '[') {
            value.kind = Json::Kind::list;
            take('[');
            if (taken(']')) return value;
            do value.list.push_back(any());
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
            value.number = digits();
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

    // Not strtod, which takes the decimal point of the program's locale.
    double digits() {
        double number = 0;
        const auto [last, error] = std::from_chars(at, end, number);
        if (error != std::errc()) fail();
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
                default: text += code;
            }
        }
        take('"');
        return text;
    }

    std::string code_point() {
        if (end - at < 4) fail();
        const unsigned long code = std::strtoul(std::string(at, 4).c_str(), nullptr, 16);
        at += 4;
        if (code < 0x80) return {static_cast<char>(code)};
        if (code < 0x800) return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
        return {static_cast<char>(0xE0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 0x3F)),
                static_cast<char>(0x80 | (code & 0x3F))};
    }
};

}  // namespace equitune
