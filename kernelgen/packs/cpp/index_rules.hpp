// What the index of a pack is, as data that both of its readers check: kernelgen/compile/pack_file.py reads this too.
//
//     {"name": RULE}      a table with this field; "name?": it may be missing; "x|y?": any of these; "*": any others
//     [RULE, LEAST]       a list of at least so many (else of any number)
//     {"null or": RULE}   null, or what the rule says
//     "text", "boolean", "any"
//     "whole LEAST MOST"  a whole number; without MOST below 2^53
//     "one of a|b|"       one of these texts
//     "letters xywg"      a text of these letters
//     "kernel", "operator"    a place in the index's list of them; "member": in its operator's list
#pragma once

namespace equitune {

inline constexpr char INDEX_RULES[] = R"json(
{
    "generator": "text",
    "machine": "text",
    "features": ["text"],
    "kernels": [{
        "source": "text",
        "entry": "text",
        "target": "text",
        "offset": "whole 0",
        "size": "whole 1",
        "sha256": "text",
        "crc32": "whole 0 4294967295",
        "resources": {"*": "any"},
        "threads?": {"fixed": "whole 0 65536", "rows_of_each": "whole 1"},
        "launch?": {
            "threads": "whole 1 1024",
            "shared": "whole 0 1048576",
            "fixed": "whole 0 2147483647",
            "most_of_unit": "whole 0 65536",
            "whole_waves": "boolean",
            "shares": [{
                "count": "one of edges|in|out|tasks",
                "per": ["whole 1"],
                "times": "whole 0 1048576",
                "scale": "whole 1 1048576"
            }, 1]
        },
        "*": "any"
    }],
    "operators": [{
        "text": "text",
        "needs": {"receiver": "boolean", "sender": "boolean"},
        "members?": ["operator", 1],
        "classes?": [["member", 1], 1],
        "calls": {"*": [{
            "outputs": "letters xywg",
            "writes": {"x|y|w|g?": "one of zero|inside|empty"},
            "reads": ["whole 0 7"],
            "order": "one of receiver|sender|element|given|",
            "gathers": "boolean",
            "partial_y": "whole 0 1048576",
            "task_nodes": "whole 0 1048576",
            "dtype": "one of float32|float64",
            "widths": {"x|y|w|g?": "whole 0 2147483647"},
            "weights": {"null or": ["whole -1 2147483647", 1]},
            "matrix?": ["whole 1 2147483647", 2],
            "marks?": "whole 0 1048576",
            "kernels": {"*": "kernel"},
            "permuted": {"*": "kernel"}
        }]}
    }],
    "*": "any"
}
)json";

}  // namespace equitune
