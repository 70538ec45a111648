"""Examples and overrides at the end of the help of each command of ``python -m sweep``."""

from __future__ import annotations

EXAMPLES = """\
examples:
  python -m sweep plan +grid=playbook
  python -m sweep plan +grid=llama8b_8gpu cluster=h100_ib400 grid.axes.tp=[1,2] --out plan.parquet
  python -m sweep run +grid=tiny
  python -m sweep run +grid=[llama1b_8gpu,llama8b_8gpu] name=one_node budget.gpu_hours=10
  python -m sweep run +grid=llama70b_512gpu launcher=rehearse
  python -m sweep run +grid=playbook launcher=slurm launcher.partition=main --detach
"""
OVERRIDES = """\
overrides (Hydra's grammar; in zsh, quote overrides with brackets):
  +grid=NAME, +grid=[A,B]      which grids (files in sweep/conf/grid, or --conf DIR/grid)
  model=NAME, model=[A,B]      models, instead of those in the grids
  cluster=NAME                 the cluster to run on, instead of the cluster that the grid names
  launcher=local|slurm|rehearse
                               local: on this machine's devices; slurm: in Slurm allocations (the default on a
                               login node); rehearse: single ranks of any layout on one device
  launcher.time_min=120        or any other option in sweep/conf/launcher/; launcher.dry=true shows the batch files
  measure=default|quick        warm-up and timed steps
  grid.axes.tp=[1,2]           change or add an axis; also grid.derive.X, grid.where.X, grid.subsample.count
  budget.gpu_hours=10          cap on expected GPU-hours
  name=NAME results_dir=DIR    the sweep's folder is results_dir/name
  plan.reuse=true              use finished attempts of other sweeps in results_dir instead of running their points
  plan.oom_margin=1.2          or any other option of sweep/conf/config.yaml
"""
PARITY_EXAMPLES = """\
examples:
  python -m sweep parity model=tiny --right "tp=2 pp=2 dp=2 zero_stage=3"
  python -m sweep parity model=tiny precision=bf16 --left "dp=4" --right "cp=2 cp_kind=ulysses tp=2 zero_stage=1"
  python -m sweep parity model=llama8b model.num_layers=2 seq_len=512 precision=fp64 --right "dp=2 zero_stage=2"
"""
PREDICT_EXAMPLES = """\
examples:
  python -m sweep predict configurations.csv --out predictions.parquet
  python -m sweep predict configurations.csv --calibrate measured.csv --out predictions.csv
"""
SEARCH_EXAMPLES = """\
examples:
  python -m sweep search +grid=llama8b_8gpu budget.gpu_hours=5
  python -m sweep search +grid=playbook launcher=slurm search.batch=8
  python -m sweep search --replay bench_final2_mfu2.csv
  python -m sweep search --replay measured.csv search.batch=1 --out replayed.parquet
"""
ADVISE_EXAMPLES = """\
examples:
  python -m sweep advise model=llama70b cluster=h100_efa gpus=512
  python -m sweep advise model=qwen3_30b_a3b cluster=h100_efa gpus=[32,64] 'recompute=[none,selective]' --top 3
  python -m sweep advise model=llama8b cluster=h200 tokens=1e12 days=30 price=2.5
  python -m sweep advise model=llama8b cluster=h200 gpus=8-64 --optimise energy
"""
ADVISE_OVERRIDES = """\
overrides:
  model=NAME cluster=NAME      model to train and cluster to train it on; cluster.FIELD=VALUE changes the cluster
  gpus=512                     number of GPUs, or several: gpus=[64,128], gpus=16-1024 (all whole nodes)
  tokens=1e12 days=30          instead of gpus: the fewest GPUs, and the least money, to train so many tokens in time
  price=2.5                    price of a GPU-hour (default: price_per_device_hour of the cluster file)
  global_batch_size=1024       sequences per step; seq_len=4096 tokens per sequence
  precision=bf16 routing=...   other fields, as in a grid
  tp=[1,2,4] recompute=none    restricts an axis of the layout; recompute=auto: by stage
  memory_budget=60             GiB that a device may take, with what is reserved on it (default: its memory)
  optimizer_offload=[0,1] activation_offload=[none,input,all]
                               what is on the host: one value, or several to compare
  results_dir=DIR              folder with measured rows and probes of the cluster (default: results)
"""
MODEL_EXAMPLES = """\
examples:
  python -m sweep model Qwen3-8B/config.json
  python -m sweep model Qwen3-8B --out conf/model/qwen3_8b.yaml
  python -m sweep advise model=Qwen3-8B/config.json cluster=h200 gpus=8
"""
PROBE_EXAMPLES = """\
examples:
  python -m sweep probe
  python -m sweep probe cluster=h200 model=llama8b_8_layers
  python -m sweep probe cluster=h100_efa launcher=slurm launcher.partition=main --nodes 2
"""
DOCTOR_EXAMPLES = """\
examples:
  python -m sweep doctor
  python -m sweep doctor cluster=h100_ib400 launcher=slurm launcher.partition=main
  python -m sweep doctor --conf conf cluster=ours launcher=ours --nodes 2 --wait 1800
"""
CLUSTER_EXAMPLES = """\
examples:
  python -m sweep cluster --from-this-machine
  python -m sweep cluster --from-slurm gpu --out conf/cluster/ours.yaml
  python -m sweep cluster --from-slurm gpu,long --gres gpu:h100:8 --base h100_efa
"""
EXPORT_EXAMPLES = """\
examples:
  python -m sweep export 295a90f3 --to torchtitan --results results/recorded
  python -m sweep export 295a90f3 --to megatron --results results/recorded --out megatron_8b
"""
CARD_EXAMPLES = """\
examples:
  python -m sweep card 295a90f3 --out mine.yaml
  python -m sweep card --all --results results/recorded/h200x2_schedules --out schedules.yaml
"""
VERIFY_EXAMPLES = """\
examples:
  python -m sweep verify mine.yaml
  python -m sweep verify schedules.yaml --only 061615f2
  python -m sweep verify *.yaml launcher=slurm launcher.partition=main
  python -m sweep verify mine.yaml --bisect v0.1..HEAD
"""
