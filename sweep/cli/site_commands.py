"""Commands about a machine or a site: cluster, doctor."""

from __future__ import annotations

from argparse import Namespace

from results.errors import UltrasweepError
from results.text.command_line import Parser, path
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.command import Command, add_conf, positive
from sweep.cli.help_texts import CLUSTER_EXAMPLES, DOCTOR_EXAMPLES


def _cluster_arguments(parser: Parser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-this-machine", action="store_true", help="ask nvidia-smi: run it on a compute node")
    source.add_argument(
        "--from-slurm", metavar="PARTITION", help="ask sinfo and scontrol about a partition, or several: a,b"
    )
    parser.add_argument("--gres", metavar="GRES", help="with --from-slurm: only nodes with these GPUs: gpu:h100:8")
    parser.add_argument(
        "--base", metavar="NAME", help="cluster file with the same GPU, whose rates to take (default: one that fits)"
    )
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="default: conf/cluster/NAME.yaml, named like the partition or host"
    )
    add_conf(parser, "cluster/")


def _cluster(options: Namespace) -> int:
    import socket

    from results.shared_filesystem.whole_files import write_output
    from sweep.composing.conffiles import ConfFolders
    from sweep.inspecting.cluster_file import cluster_file, file_name, from_machine, from_partition, print_cluster_file
    from sweep.inspecting.nvidia_smi import read_gpus
    from sweep.inspecting.slurm_nodes import read_nodes

    if options.gres is not None and options.from_slurm is None:
        raise UltrasweepError("--gres needs --from-slurm: nvidia-smi shows the GPUs of this machine")
    folders = ConfFolders(tuple(options.conf))
    proposed = options.from_slurm if options.from_slurm is not None else socket.gethostname().partition(".")[0]
    out = file_name(options.out, proposed)
    if options.from_slurm is not None:
        found = from_partition(read_nodes(options.from_slurm, options.gres))
    else:
        found = from_machine(read_gpus())
    made = cluster_file(found, out.stem, options.base, folders)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_output(out, made.text)
    print_cluster_file(made, found, out, open_console(soft_wrap=True))
    return 0


CLUSTER = Command(
    name="cluster",
    description=(
        "Write the cluster file of this machine or of a Slurm partition, as far as nvidia-smi or Slurm know. The file\n"
        "and the output say what could not be known: it is null, or the rate of a shipped file with the same GPU."
    ),
    arguments=_cluster_arguments,
    run=_cluster,
    epilog=CLUSTER_EXAMPLES,
)


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="cluster=NAME (needed with launcher=slurm), launcher=local or slurm and its options, results_dir=DIR",
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes to check in one job (default: 1)")
    parser.add_argument(
        "--wait", type=positive, default=600, metavar="SECONDS", help="longest time for the job (default: 600)"
    )
    add_conf(parser, "cluster/")


def _doctor(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.doctor import diagnose, print_diagnosis

    console = open_console(soft_wrap=True)
    folders = ConfFolders(tuple(options.conf))
    diagnosis = diagnose(
        options.overrides,
        folders,
        options.nodes,
        options.wait,
        lambda line: console.print(printable(line), highlight=False, markup=False),
    )
    if isinstance(diagnosis, str):
        print(printable(diagnosis.rstrip(), keep="\n\t"))
        return 0
    print_diagnosis(diagnosis, console)
    return diagnosis.exit_code


DOCTOR = Command(
    name="doctor",
    description=(
        "Check what must be true on a compute node, through one short Slurm job or on this machine. Each line is\n"
        "pass, fail or unknown, with the value and the remedy. Exit code: 0 nothing fails, 1 something does, 2 a\n"
        "mistake."
    ),
    arguments=_doctor_arguments,
    run=_doctor,
    epilog=DOCTOR_EXAMPLES,
)
