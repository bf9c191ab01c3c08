"""Texts of processes that were ended from outside: by the kernel, a scheduler or a monitor."""

from __future__ import annotations

from services.shared.memory.oom_log.formats.text_format import (
    binary,
    documented,
    reported,
    source,
    text_format,
)
from services.shared.memory.oom_log.message_formats import Backend, MessageKind

TIME_LIMITS = (
    text_format(
        "L3",
        MessageKind.TIME_LIMIT,
        Backend.UNKNOWN,
        r"CANCELLED AT .{1,40} DUE TO (?:TIME LIMIT|PREEMPTION|NODE|JOB REQUEUE)"
        r"|job killed: walltime|TERM_RUNLIMIT",
        examples=(
            "slurmstepd: error: *** STEP 12.0 ON node7 CANCELLED AT 2026-01-01T00:00:00 DUE TO "
            "TIME LIMIT ***",
            "=>> PBS: job killed: walltime 3620 exceeded limit 3600",
            "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        ),
        origins=(
            source("Slurm", "src/slurmd/slurmstepd/req.c", "26.11.0rc1"),
            documented("PBS and LSF", "job messages", "all"),
        ),
        triggers=("CANCELLED AT", "walltime", "TERM_RUNLIMIT"),
    ),
)
KILLS = (
    text_format(
        "H9",
        MessageKind.KILLED,
        Backend.HOST,
        r"[Oo]ut of memory: Kill(?:ed)? process [0-9]{1,9} .{0,300}?"
        r"anon-rss:(?P<resident_kib>[0-9]{1,15})kB",
        examples=(
            "Out of memory: Killed process 4242 (python) total-vm:91238912kB, anon-rss:64210944kB, "
            "file-rss:2048kB, shmem-rss:0kB",
            "Memory cgroup out of memory: Killed process 77 (python) total-vm:9000kB, "
            "anon-rss:8000kB",
        ),
        origins=(reported("Linux", "mm/oom_kill.c", "4.x to 6.x"),),
        triggers=("anon-rss", "ut of memory: Kill"),
    ),
    text_format(
        "H5",
        MessageKind.KILLED,
        Backend.HOST,
        r"[Tt]asks? w\w{2,3} killed due to the node running low on memory"
        r"|Workers? \(tasks / actors\) killed due to memory pressure"
        r"|ray\.exceptions\.OutOfMemoryError"
        r"|More than [0-9]{1,3}% of the memory on node \S{1,80} is used"
        r"|\bPID\s{1,8}MEM\(GB\)\s{1,8}COMMAND\b"
        r"|was running was [0-9.]{1,12}GB / [0-9.]{1,12}GB \(",
        examples=(
            "2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due "
            "to other reasons at node (ID: a, IP: b)",
            "Task was killed due to the node running low on memory.",
            "Top 10 memory users: PID     MEM(GB) COMMAND 40126   11.20   ray::WorkerDict",
            "More than 95% of the memory on node worker-1 is used (458.07 / 482.0 GB).",
        ),
        origins=(
            binary("Ray", "raylet", "2.49.2"),
            source("Ray", "ray/_private/memory_monitor.py", "2.49.2"),
        ),
        triggers=(
            "running low on memory",
            "memory pressure",
            "of the memory on node",
            "MEM(GB)",
            "GB / ",
        ),
    ),
    text_format(
        "H10",
        MessageKind.KILLED,
        Backend.HOST,
        r"session crashed after using all available RAM"
        r"|notebook tried to allocate more memory than is available",
        examples=(
            "Your session crashed after using all available RAM.",
            "Your notebook tried to allocate more memory than is available. It has restarted.",
        ),
        origins=(reported("Colab and Kaggle notebooks", "-", "all"),),
        triggers=("all available RAM", "more memory than is available"),
    ),
    text_format(
        "H2",
        MessageKind.KILLED,
        Backend.HOST,
        r"DataLoader worker \(pid.{0,20}\) is killed by signal: Killed",
        examples=("RuntimeError: DataLoader worker (pid 4321) is killed by signal: Killed.",),
        origins=(binary("PyTorch", "torch/csrc/DataLoader.cpp", "2.13.0"),),
        triggers=("DataLoader worker",),
    ),
)
GENERAL_KILLS = (
    text_format(
        "H1",
        MessageKind.KILLED,
        Backend.HOST,
        r"exit ?(?:codes?|status)\s{0,4}[:=]?\s{0,4}(?:-9|137)\b|return ?code\s{0,4}[:=]?\s{0,4}-9\b"
        # Ray lists a kill among the "potential root causes" of every lost worker.
        r"|(?<!via )(?<!via Signals\.)SIGKILL(?! by OOM killer due to high)|\bsignal 9\b|OOMKilled"
        r"|(?<!by )[Oo][Oo][Mm][ _-]?[Kk]ill|\bOUT_OF_MEMORY\b(?= \(exit| +0:)"
        r"|[Oo]ut of memory: Kill|(?:^|[0-9:]\s{1,9})Killed\b"
        r"|[Ee]xceeded (?:job |step )?(?:virtual )?memory limit|low on resource: memory"
        r"|TERM_MEMLIMIT|cgroup out-of-memory handler|\btask [0-9,-]{1,40}: Out Of Memory"
        r"|\bOUT_OF_ME\+|job killed: v?mem [0-9]{1,15}kb exceeded limit|zsh: killed\b"
        r"|Exit code is 137\b|systemd-oomd killed|killed by the OOM killer"
        r"|earlyoom: sending SIG\w{3,5} to process",
        examples=(
            "exits with return code = -9",
            "failed (exitcode: -9) local_rank: 0 (pid: 77) traceback : Signal 9 (SIGKILL) received "
            "by PID 77",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks "
            "have been OOM Killed.",
            "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=12.batch. Some of your "
            "processes may have been killed by the cgroup out-of-memory handler.",
            "State: OUT_OF_MEMORY (exit code 0)",
            "The node was low on resource: memory. Container trainer was using 5053216Ki",
            "reason: OOMKilled exitCode: 137",
            "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
            "StepId=12.0 exceeded memory limit (104857600 > 83886080), being killed",
            "srun: error: node01: task 3: Out Of Memory",
            "=>> PBS: job killed: mem 4194304kb exceeded limit 4000000kb",
            "zsh: killed     python train.py",
            "Container killed on request. Exit code is 137",
            "systemd-oomd killed 25 process(es) in this unit.",
        ),
        origins=(
            source("DeepSpeed", "deepspeed/launcher/launch.py", "0.19.6"),
            source(
                "Slurm",
                "src/plugins/task/cgroup/task_cgroup_memory.c, src/interfaces/jobacct_gather.c",
                "17.11 (oom-kill), 26.11.0rc1 (oom_kill)",
            ),
            reported("torchrun, shells", "exit codes and signals", "all"),
            reported("Kubernetes", "pkg/kubelet/eviction/helpers.go", "1.12 and later"),
            documented("LSF and PBS", "job messages", "all"),
            documented("systemd", "systemd-oomd.service, systemd.kill", "248 and later"),
            reported("earlyoom, zsh, YARN", "kill notices", "all"),
        ),
        triggers=(
            "Out Of Memory",
            "OUT_OF_ME",
            "job killed",
            "sh: killed",
            "killed by the",
            "Exit code is",
            "earlyoom",
            "Killed",
            "signal 9",
            "exit status",
            "returncode",
            "exitcode",
            "exit code",
            "exitCode",
            "return code",
            "SIGKILL",
            "memory limit",
            "resource: memory",
            "MEMLIMIT",
            "OUT_OF_MEMORY",
            "oom",
            "OOM",
        ),
    ),
)
