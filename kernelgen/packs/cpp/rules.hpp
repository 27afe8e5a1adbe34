// Checks the index of a pack once, when it is opened, by index_rules.hpp, as kernelgen/compile/pack_file.py does.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>

#include "index_rules.hpp"
#include "json.hpp"

namespace equitune {

class Rules {
public:
    // Throws the reason unless the index obeys the rules.
    static void check(const Json& index) {
        static const Json rules = JsonReader(INDEX_RULES).read();
        const Counts counts{{"kernel", size_of(index, "kernels")}, {"operator", size_of(index, "operators")}};
        Rules(counts).value(index, rules, "the index");
        std::set<std::string> texts;
        for (const Json& op : index["operators"].list) {
            if (!texts.insert(op["text"].text).second) fail("an operator", "is there twice");
            if (op.has("members") != op.has("classes")) fail("an operator", "has only one of members and classes");
            for (const auto& [name, parts] : op["calls"].table)
                for (const Json& part : parts.list)
                    for (const char* const some : {"kernels", "permuted"})
                        for (const auto& [key, place] : part[some].table)
                            runnable(key, index["kernels"].list[place.integer()]);
        }
    }

private:
    using Counts = std::map<std::string, std::int64_t>;
    explicit Rules(Counts counts) : counts(std::move(counts)) {}

    const Counts counts;  // places that are valid, by what they are in

    [[noreturn]] static void fail(const std::string& where, const std::string& what) {
        throw std::runtime_error(where + " " + what);
    }

    static std::int64_t size_of(const Json& table, const std::string& name) {
        return table.has(name) ? static_cast<std::int64_t>(table[name].list.size()) : 0;
    }

    // key: dtype of the indices and target, such as "int64 cpu".
    static void runnable(const std::string& key, const Json& kernel) {
        const std::string dtype = key.substr(0, 6), target = key.size() > 6 ? key.substr(6) : "";
        const bool known = dtype == "int32 " || dtype == "int64 ";
        if (!known || target != kernel["target"].text || !kernel.has(target == "cpu" ? "threads" : "launch"))
            fail("kernel '" + key + "' of a call", "is for " + kernel["target"].text + ", or does not say how to launch it");
    }

    void value(const Json& given, const Json& rule, const std::string& where) const {
        if (rule.kind == Json::Kind::list) {
            if (given.kind != Json::Kind::list) fail(where, "is no list");
            if (rule.list.size() > 1 && static_cast<std::int64_t>(given.list.size()) < rule.list[1].integer())
                fail(where, "is too short");
            for (const Json& item : given.list) value(item, rule.list[0], where + "[]");
        } else if (rule.kind == Json::Kind::table && rule.has("null or")) {
            if (given.kind != Json::Kind::null) value(given, rule["null or"], where);
        } else if (rule.kind == Json::Kind::table) {
            if (given.kind != Json::Kind::table) fail(where, "is no table");
            Counts own = counts;
            if (rule.has("members?")) own["member"] = size_of(given, "members");
            Rules(std::move(own)).table(given, rule, where);
        } else if (!plain(given, rule.text)) {
            fail(where, "is not: " + rule.text);
        }
    }

    void table(const Json& given, const Json& rule, const std::string& where) const {
        std::set<std::string> known;
        for (const auto& [names, inner] : rule.table) {
            const bool optional = names.back() == '?';
            for (const std::string& name : words(names.substr(0, names.size() - optional))) {
                if (name == "*") continue;
                known.insert(name);
                if (given.has(name)) value(given[name], inner, where + "." + name);
                else if (!optional) fail(where, "lacks " + name);
            }
        }
        for (const auto& [name, inner] : given.table) {
            if (known.count(name)) continue;
            if (!rule.has("*")) fail(where, "has an unknown field");
            value(inner, rule["*"], where + "." + name);
        }
    }

    bool plain(const Json& given, const std::string& rule) const {
        const std::string kind = rule.substr(0, rule.find(' '));
        const std::string rest = rule.substr(std::min(rule.size(), kind.size() + 1));
        if (kind == "any") return true;
        if (kind == "boolean") return given.kind == Json::Kind::boolean;
        if (kind == "whole") {
            const std::size_t gap = rest.find(' ');
            const long long most = gap == std::string::npos ? Json::MOST : std::stoll(rest.substr(gap));
            return given.is_integer() && std::stoll(rest) <= given.integer() && given.integer() <= most;
        }
        if (const auto count = counts.find(kind); count != counts.end())
            return given.is_integer() && 0 <= given.integer() && given.integer() < count->second;
        if (given.kind != Json::Kind::text) return false;
        if (kind == "letters") return given.text.find_first_not_of(rest) == std::string::npos;
        const auto some = words(rest.substr(std::min<std::size_t>(rest.size(), 3)));  // after "of "
        return kind == "text" || std::find(some.begin(), some.end(), given.text) != some.end();
    }

    // The parts of a text between its bars.
    static std::vector<std::string> words(const std::string& text) {
        std::vector<std::string> found(1);
        for (const char letter : text) {
            if (letter == '|') found.emplace_back();
            else found.back() += letter;
        }
        return found;
    }
};

}  // namespace equitune
