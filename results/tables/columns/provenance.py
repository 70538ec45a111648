"""Columns of attempts: where, by what code and on which devices an attempt ran, and the rates of its nodes."""

from __future__ import annotations

import pyarrow as pa

from results.tables.columns.column import BOOL, FLOAT, TEXT, Column

PROVENANCE_COLUMNS: tuple[Column, ...] = (
    # provenance
    Column("launcher", TEXT, "Launcher of the attempt: local, slurm or rehearse"),
    Column("cluster", TEXT, "Name of the cluster description used for predictions"),
    Column("backend", TEXT, "Kind of device in the cluster description: cuda or cpu"),
    Column("hosts", pa.list_(TEXT), "Names of the hosts on which the ranks ran"),
    Column(
        "nodes", pa.list_(TEXT), "Nodes on which the ranks ran, by the scheduler's names, in the order of the ranks"
    ),
    Column("scheduler_job", TEXT, "Id of the allocation, as the scheduler's queue shows it"),
    Column("pilot_id", TEXT, "Id of the pilot that ran the attempt, or that recorded it after that pilot had died"),
    Column("device_name", TEXT, "Name of the device as the driver reports it"),
    Column("device_ids", pa.list_(TEXT), "UUIDs of the devices"),
    Column("git_commit", TEXT, "Git commit of the code that ran"),
    Column("git_dirty", BOOL, "True: the checkout had uncommitted changes"),
    Column("ultrasweep_version", TEXT, "Version of this package"),
    Column("python_version", TEXT, "Version of Python"),
    Column("torch_version", TEXT, "Version of PyTorch"),
    Column("cuda_version", TEXT, "Version of PyTorch's CUDA runtime"),
    Column("nccl_version", TEXT, "Version of NCCL"),
    Column("triton_version", TEXT, "Version of Triton"),
    Column("driver_version", TEXT, "Version of the NVIDIA driver"),
    Column(
        "nccl_environment",
        TEXT,
        "Environment variables NCCL_* and TORCH_NCCL_* in effect, as JSON by name; a value that differs between "
        "ranks is a list",
    ),
    Column(
        "nccl_transports",
        pa.list_(TEXT),
        "Transports of NCCL's connections as its log names them: P2P or SHM inside a node, NET/Socket or NET/IB "
        "between nodes; null: no NCCL, or its log does not show them",
    ),
    Column("command", TEXT, "Command line that started the sweep"),
    Column("log_dir", TEXT, "Folder of the attempt's logs, relative to the sweep's folder; it may be packed: NAME.zip"),
    # rates of the attempt's nodes when their pilot started: the lowest of their devices
    Column(
        "check_matmul_flops",
        FLOAT,
        "Rate of a large bf16 matrix product, measured before the pilot's first point; lowest of the attempt's devices",
        "FLOP/s",
    ),
    Column(
        "check_copy_bytes_per_s",
        FLOAT,
        "Bytes read and written per second by copies on the device, measured before the pilot's first point; lowest "
        "of the attempt's devices",
        "B/s",
    ),
    Column(
        "check_all_reduce_inside_node_bytes_per_s",
        FLOAT,
        "Bus bandwidth of an all-reduce over all devices of a node, measured before the pilot's first point; lowest "
        "of the attempt's nodes",
        "B/s",
    ),
    Column(
        "check_all_reduce_between_nodes_bytes_per_s",
        FLOAT,
        "Bus bandwidth of an all-reduce over one device of each of the pilot's nodes, with all devices active at "
        "once, measured before the pilot's first point; the lowest value",
        "B/s",
    ),
)
