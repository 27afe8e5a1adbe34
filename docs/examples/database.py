"""Tune a small problem, then read the database and the trials with pandas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

results = Path("results")
command = [sys.executable, "-m", "autotune", "tune", "quick", "--budget", "2m", "--device", "cpu", "--no-peers"]
subprocess.run([*command, "--results", str(results)], check=True, capture_output=True)

(file,) = results.glob("*.json")  # results/DEVICE.json
entries = pd.DataFrame(json.loads(file.read_text())["entries"])
print(entries[["label", "direction", "dtype", "graph_class"]].to_string(index=False))
default_us = entries["default"].map(lambda default: default["time_us"])
print(f"no entry is slower than the default: {(entries['time_us'] <= default_us).all()}")

files = (results / "trials").rglob("*.jsonl")
trials = pd.concat(pd.read_json(path, lines=True) for path in files)
print(f"searches: {trials['study'].nunique()}, states of trials: {', '.join(sorted(trials['state'].unique()))}")
fastest = trials[trials["state"] == "ok"].sort_values("time_us").groupby("study").first()
print(f"knobs of the fastest: {sorted(fastest['schedule'].iloc[0])}")
