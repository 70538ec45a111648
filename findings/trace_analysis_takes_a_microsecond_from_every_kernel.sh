#!/usr/bin/env bash
# HolisticTraceAnalysis 0.5.0. Every kernel loses a microsecond, and short kernels make a busy GPU idle.
#
# Expected: traces of torch.profiler have nanoseconds since torch 2.4, as fractions of a microsecond, and HTA's durations and idle
# times are those of the trace, but for rounding that is lost in the mean.
# Behaviour: starts are rounded up and ends down to whole microseconds before anything is computed. Both shorten a kernel, so that
# each is one microsecond too short in the mean, and the microsecond is idle time. With kernels of 200 us nobody sees it; with
# those of 5 us (norms, casts, optimizers, a small model, a captured step) 5 % idle read as 23 %, and a GPU that is busy for
# eight ninths of the time, with kernels of 2.4 us, as half idle. Sums and means of the kernel breakdown are too small by the
# same microsecond. A warning says that timestamps are rounded, and not what it costs. HTA_DISABLE_NS_ROUNDING=1 is right.
# Who meets it: idle-time and kernel breakdowns of steps with many short kernels, and comparisons of such a step with a fused one:
# fusing two kernels wins a microsecond that was not there.
#
# Output of 2026-11-30 (5000 kernels on one stream, 0.3 us between them):
#   kernels of 200.4 us, idle 0.1 %: by default mean kernel 199.40 us, idle 0.7 %; without rounding mean kernel 200.40 us, idle 0.1 %
#   kernels of 20.4 us, idle 1.4 %: by default mean kernel 19.40 us, idle 6.3 %; without rounding mean kernel 20.40 us, idle 1.4 %
#   kernels of 5.4 us, idle 5.3 %: by default mean kernel 4.40 us, idle 22.8 %; without rounding mean kernel 5.40 us, idle 5.3 %
#   kernels of 2.4 us, idle 11.1 %: by default mean kernel 1.40 us, idle 48.1 %; without rounding mean kernel 2.40 us, idle 11.1 %
#   kernels of 1.4 us, idle 17.6 %: by default mean kernel 0.40 us, idle 76.5 %; without rounding mean kernel 1.40 us, idle 17.6 %
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet HolisticTraceAnalysis==0.5.0 numpy==2.4.6 pandas==3.1.1 2>/dev/null
cat >"$folder/idle.py" <<'PYTHON'
import json
import os
import sys

from hta.trace_analysis import TraceAnalysis

folder, KERNELS, GAP = sys.argv[1], 5000, 0.3


def kernel(at, start, dur):
    arguments = {"stream": 7, "correlation": at, "device": 0}
    return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": start, "dur": dur, "args": arguments}


def launch(at, start):
    named = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": at}}
    return {**named, "pid": 1, "tid": 1, "ts": start, "dur": 0.9}


def trace(length):
    """Kernels of one length, in microseconds, with gaps of 0.3 between them, in the form that torch.profiler writes."""
    starts = [1000.123 + at * (length + GAP) for at in range(KERNELS)]
    events = []
    for at, start in enumerate(starts, 1):
        events += [launch(at, round(start - 20, 3)), kernel(at, round(start, 3), length)]
    return {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}, "traceEvents": events}


for length in (200.4, 20.4, 5.4, 2.4, 1.4):
    texts = []
    for value in ("0", "1"):
        os.environ["HTA_DISABLE_NS_ROUNDING"] = value
        path = os.path.join(folder, f"{length}-{value}")
        os.makedirs(path)
        with open(os.path.join(path, "rank0.json"), "w") as file:
            json.dump(trace(length), file)
        analysis = TraceAnalysis(trace_dir=path)
        idle = analysis.get_temporal_breakdown(visualize=False)["idle_time_pctg"].item()
        kernels = analysis.get_gpu_kernel_breakdown(visualize=False)[1]
        texts.append(f"mean kernel {kernels['mean (us)'].item():.2f} us, idle {idle:.1f} %")
    true = f"kernels of {length} us, idle {100 * GAP / (length + GAP):.1f} %"
    print(f"{true}: by default {texts[0]}; without rounding {texts[1]}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/idle.py" "$folder/traces" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
kernels of 200.4 us, idle 0.1 %: by default mean kernel 199.40 us, idle 0.7 %; without rounding mean kernel 200.40 us, idle 0.1 %
kernels of 20.4 us, idle 1.4 %: by default mean kernel 19.40 us, idle 6.3 %; without rounding mean kernel 20.40 us, idle 1.4 %
kernels of 5.4 us, idle 5.3 %: by default mean kernel 4.40 us, idle 22.8 %; without rounding mean kernel 5.40 us, idle 5.3 %
kernels of 2.4 us, idle 11.1 %: by default mean kernel 1.40 us, idle 48.1 %; without rounding mean kernel 2.40 us, idle 11.1 %
kernels of 1.4 us, idle 17.6 %: by default mean kernel 0.40 us, idle 76.5 %; without rounding mean kernel 1.40 us, idle 17.6 %
EXPECTED
