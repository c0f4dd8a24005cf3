"""Group, pivot and plot results with pandas. In the repository: python examples/analysis.py [PLOT.png]"""

import sys

import vramprobe

GIB = 1024**3

records = vramprobe.load("results/cpu/quickstart").query("outcome == 'ok'")
records["bytes_per_param"] = records.peak_allocated_bytes / records.num_params

# Group: bytes per parameter at the peak, by method.
print(records.groupby("method")["bytes_per_param"].agg(["count", "min", "median", "max"]).round(2).to_markdown())

# Pivot: one row per model, one column per method, the peak in GiB.
peaks = records.pivot_table("peak_allocated_bytes", index=["num_params", "model_label"], columns="method") / GIB
print(peaks.droplevel("num_params").round(2).to_markdown())

# Phases: the median peak of each phase of the second step.
phases = vramprobe.load("results/cpu/quickstart", of="phases")
steady = phases[phases.step == 2].groupby(["method", "phase"])["allocated_peak_bytes"].median() / GIB
print(steady.unstack().round(2).to_markdown())

# Plot: what the peak is made of, for full fine-tuning of each model.
parts = [name for name in records if name.startswith("at_peak_") and name != "at_peak_total_bytes"]
full = records[records.method == "full"].groupby(["num_params", "model_label"])[parts].max().droplevel(0) / GIB
axes = full.rename(columns=lambda name: name[len("at_peak_") : -len("_bytes")]).plot.barh(stacked=True, figsize=(8, 5))
axes.set(xlabel="live at the peak, GiB", ylabel="", title="Full fine-tuning")
axes.figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "peaks.png", bbox_inches="tight")
