"""Run by a Python that has Kernel Tuner: validates an exported folder, replays its records by simulation.

Prints a line of JSON: the number of valid files, and the best configuration of each record.
"""

import json
import sys
import warnings
from pathlib import Path

import jsonschema  # type: ignore[import-untyped, import-not-found, unused-ignore]
from kernel_tuner import tune_cache  # type: ignore[import-not-found, unused-ignore]
from kernel_tuner.file_utils import (  # type: ignore[import-not-found, unused-ignore]
    input_file_schema,
    output_file_schema,
)

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
SCHEMAS = {
    ".t1.json": jsonschema.Draft7Validator(input_file_schema()[1]),
    ".t4.json": jsonschema.Draft202012Validator(output_file_schema("results")[1]),
    "metadata.json": jsonschema.Draft202012Validator(output_file_schema("metadata")[1]),
}
valid = 0
for ending, schema in SCHEMAS.items():
    for path in folder.rglob(f"*{ending}"):
        schema.validate(json.loads(path.read_text()))
        valid += 1
best = {}
for path in folder.glob("*/record/*.cache.json"):
    results, environment = tune_cache(str(path), quiet=True)
    best[path.name.removesuffix(".cache.json")] = {**environment["best_config"], "evaluated": len(results)}
print(json.dumps({"valid": valid, "best": best}))
