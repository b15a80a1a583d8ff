"""System calls of Linux that Python lacks, with their numbers.

Imports only the standard library. Every call raises OSError: on another system or machine, ENOSYS.
"""

import ctypes
import errno
import os
import sys

# Name and numbers on x86_64 and aarch64; aarch64 lacks the older forms of a call.
_NUMBERS = """
fork 57 -; vfork 58 -; clone 56 220; clone3 435 435; execve 59 221; execveat 322 281; setsid 112 157; setpgid 109 154
unshare 272 97; setns 308 268; kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240; pidfd_open 434 434; pidfd_send_signal 424 424; pidfd_getfd 438 438; ptrace 101 117
process_vm_readv 310 270; process_vm_writev 311 271; process_madvise 440 440; process_mrelease 448 448; kcmp 312 272
migrate_pages 256 238; move_pages 279 239; perf_event_open 298 241; prlimit64 302 261; setpriority 141 140
sched_setaffinity 203 122; sched_setscheduler 144 119; sched_setparam 142 118; sched_setattr 314 274; ioprio_set 251 30
chmod 90 -; fchmod 91 52; fchmodat 268 53; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54; utime 132 -
utimes 235 -; futimesat 261 -; utimensat 280 88; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14
lremovexattr 198 15; fremovexattr 199 16; truncate 76 45; mknod 133 -; mknodat 259 33; socket 41 198
socketpair 53 199; connect 42 203; bind 49 200; listen 50 201; accept 43 202; accept4 288 242; io_uring_setup 425 425
io_uring_enter 426 426; io_uring_register 427 427; shmget 29 194; semget 64 190; msgget 68 186; mq_open 240 180
memfd_create 319 279; memfd_secret 447 447; mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51
move_mount 429 429; open_tree 428 428; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433
mount_setattr 442 442; bpf 321 280; userfaultfd 323 282; keyctl 250 219; add_key 248 217; request_key 249 218
name_to_handle_at 303 264; open_by_handle_at 304 265; fanotify_init 300 262; inotify_init 253 -; inotify_init1 294 26
personality 135 92; modify_ldt 154 -; prctl 157 167; ioctl 16 29; fcntl 72 25; capset 126 91; seccomp 317 277
landlock_create_ruleset 444 444; landlock_add_rule 445 445; landlock_restrict_self 446 446; sync 162 81
shmat 30 196; shmctl 31 195; semop 65 193; semctl 66 191; semtimedop 220 192; msgsnd 69 189; msgrcv 70 188
msgctl 71 187; mq_unlink 241 181
"""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's names of them, in filters of calls
MACHINE = os.uname().machine if sys.platform == "linux" else ""
NUMBERS = {
    name: int(number)
    for name, *numbers in (entry.split() for entry in _NUMBERS.replace("\n", ";").split(";") if entry.strip())
    for machine, number in zip(MACHINES, numbers, strict=True)
    if machine == MACHINE and number != "-"
}
SET_DEATH_SIGNAL, SET_SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38  # of prctl

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def call(name: str, *values: int | bytes | ctypes.Structure | None) -> int:
    """Make a system call; texts are bytes, and numbers are passed in full width."""
    if name not in NUMBERS:
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result: int = _LIBRARY.syscall(ctypes.c_long(NUMBERS[name]), *wide)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    """Change a property of this process."""
    if sys.platform != "linux" or _LIBRARY.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) < 0:
        raise OSError(errno.ENOSYS, f"prctl {option}: {os.strerror(errno.ENOSYS)}")
