"""Confinement of the calling process by Linux's kernel, for good.

Each mechanism is a function. `seccomp` refuses processes, signals and limits of others, network, and changes of
files' metadata. `Landlock` and `namespaces` each leave only some paths readable and one folder writable; the folder of
`namespaces` is in memory and has limits of its own. A process is held by `seccomp` and one of the two others.
Imports only the standard library.
"""

import ctypes
import errno
import os
import resource
import site
import struct
import sys
from collections.abc import Callable, Iterable, Mapping

from mindrlhf.workers.system_calls import MACHINE, MACHINES, NO_NEW_PRIVILEGES, NUMBERS, call, prctl

FOLDER_BYTES = 1 << 26  # of the folder
FOLDER_FILES = 1 << 10
THREADS = 1024  # the kernel exempts root
PARTS = ("lib", "lib64", "share/zoneinfo")  # of a prefix; more of it may be a user's home
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo")
READABLE = (*LIBRARIES, "/etc/ld.so.cache", "/etc/localtime")

# Landlock: rights to files by version, rights to read, to read and write, and TCP and processes of version 4 and 6.
FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 5: 0xFFFF}
READ, READ_FOLDER, WRITE = 1 << 2, 1 << 3, 1 << 1
TCP = 3
OTHER_PROCESSES = 3

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000  # of unshare
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18  # of mount
DETACH = 2
# Flags of statvfs that a remount has to repeat, as mount knows them: nosuid, nodev, noexec, noatime, nodiratime and
# relatime.
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}

# Refused calls that have no exception; a process may make threads, and signal itself.
REFUSED = """
fork vfork execve execveat setsid setpgid unshare setns tkill pidfd_open pidfd_send_signal pidfd_getfd ptrace
process_vm_readv process_vm_writev process_madvise process_mrelease kcmp migrate_pages move_pages perf_event_open
setpriority sched_setscheduler sched_setparam sched_setattr ioprio_set chmod fchmod fchmodat chown fchown lchown
fchownat utime utimes futimesat utimensat setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr truncate
mknod mknodat socket connect bind listen accept accept4 shmget semget msgget mq_open memfd_create memfd_secret mount
umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr bpf userfaultfd keyctl
add_key request_key name_to_handle_at open_by_handle_at fanotify_init inotify_init inotify_init1 personality
modify_ldt capset sync shmat shmctl semop semctl semtimedop msgsnd msgrcv msgctl mq_unlink
"""
ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")  # libraries have other ways for these
FIRST_UNKNOWN = 451  # newer calls are absent too
MAKE_THREAD = 0x10000  # of clone
STREAM = (1, 0x801, 0x80001, 0x80801)  # of socketpair, with and without its flags
# Of ioctl: ask for a terminal and its size, and close on exec, block, or count what can be read.
TERMINAL_AND_WAITING = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
DESCRIPTORS_AND_LOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)  # of fcntl
NAMES_AND_QUESTIONS = (3, 15, 16, 21, 23, 27, 39, 0x53564D41)  # of prctl


def confine(mechanisms: Iterable[str], folder: str) -> None:
    """Confine this process to an empty folder by all of `mechanisms`.

    The folder becomes its current directory. OSError if a mechanism does not work.
    """
    for name in mechanisms:
        MECHANISMS[name](folder)


def readable() -> list[str]:
    """List existing paths that Python and its libraries are read from, none below another."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    given = [*READABLE, *(f"{prefix}/{part}" for prefix in prefixes for part in PARTS), *site.getsitepackages()]
    found = {path for one in given for path in (one, os.path.realpath(one)) if os.path.exists(path)}
    return sorted(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def namespaces(folder: str) -> None:
    """Move to a file system of readable paths and an empty folder."""
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", NEW_USERS | NEW_MOUNTS)
    except OSError:
        call("unshare", NEW_MOUNTS)  # root needs no users of its own
    else:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)
        resource.setrlimit(resource.RLIMIT_NPROC, (THREADS, THREADS))  # of these users
    _mount(None, "/", RECURSIVE | PRIVATE)
    _mount("tmpfs", folder, NO_SUID | NO_DEVICES, "mode=755")
    for path in (*readable(), *DEVICES):
        _bind(path, folder + path)
    own = folder + folder
    os.makedirs(own)
    _mount("tmpfs", own, NO_SUID | NO_DEVICES, f"mode=700,size={FOLDER_BYTES},nr_inodes={FOLDER_FILES}")
    for place in _mounts(folder):
        if place != own:
            given = os.statvfs(place).f_flag
            kept = sum(flag for known, flag in KEPT.items() if given & known)
            _mount(None, place, REMOUNT | BIND | READ_ONLY | NO_SUID | kept)
    os.chdir(folder)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir(folder)


def landlock(folder: str) -> None:
    """Leave readable paths, and a folder to change, by Landlock."""
    version = call("landlock_create_ruleset", None, 0, 1)
    rights = max(value for known, value in FILE_RIGHTS.items() if known <= version)
    fields = [rights, *([TCP] if version >= 4 else []), *([OTHER_PROCESSES] if version >= 6 else [])]
    rules = call("landlock_create_ruleset", struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields), 0)
    allowed = dict.fromkeys(readable(), READ) | dict.fromkeys(DEVICES, READ | WRITE) | {folder: rights}
    for path, right in allowed.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        right |= READ_FOLDER if os.path.isdir(path) else 0
        call("landlock_add_rule", rules, 1, struct.pack("=Qi", right, place), 0)
        os.close(place)
    prctl(NO_NEW_PRIVILEGES, 1)
    call("landlock_restrict_self", rules, 0)
    os.close(rules)
    os.chdir(folder)


def system_calls(folder: str) -> None:
    """Give up privileges, and the calls that reach outside."""
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))
    prctl(NO_NEW_PRIVILEGES, 1)
    program = ctypes.create_string_buffer(_filter())
    described = struct.pack("HxxxxxxP", len(program.raw) // 8, ctypes.addressof(program))
    call("seccomp", 1, 1, described)  # a filter, for all threads


MECHANISMS: Mapping[str, Callable[[str], None]] = {
    "namespaces": namespaces,
    "Landlock": landlock,
    "seccomp": system_calls,
}


def held(mechanisms: Iterable[str]) -> bool:
    """Test that these mechanisms together hold code of a stranger."""
    return "seccomp" in mechanisms and not {"Landlock", "namespaces"}.isdisjoint(mechanisms)


def _mount(what: str | None, place: str, flags: int, options: str | None = None) -> None:
    kind = what and what.encode()
    call("mount", kind, os.fsencode(place), kind, flags, options and options.encode())


def _bind(path: str, place: str) -> None:
    """Show a path, with what is mounted below it, at another place."""
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    call("mount", os.fsencode(path), os.fsencode(place), None, BIND | RECURSIVE, None)


def _mounts(folder: str) -> list[str]:
    """List mounts at a folder and below it, the folder last."""
    with open("/proc/self/mountinfo", "rb") as stream:
        places = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in stream]
    return sorted((place for place in map(os.fsdecode, places) if f"{place}/".startswith(f"{folder}/")), reverse=True)


def _filter() -> bytes:
    """Assemble the kernel's program for deciding on a call.

    Each instruction has 8 bytes.
    """

    def instruction(code: int, value: int = 0, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow = instruction(give, 0x80000000), instruction(give, 0x7FFF0000)
    refuse, absent = (instruction(give, 0x00050000 | error) for error in (errno.EPERM, errno.ENOSYS))
    machine = instruction(load, 4)
    number = instruction(load, 0)
    own = os.getpid()
    only = {
        **dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), (0, (own,))),
        **dict.fromkeys(("prlimit64", "sched_setaffinity"), (0, (0, own))),
        "socketpair": (1, STREAM),
        "ioctl": (1, TERMINAL_AND_WAITING),
        "fcntl": (1, DESCRIPTORS_AND_LOCKS),
        "prctl": (0, NAMES_AND_QUESTIONS),
    }
    program = [machine, instruction(equal, MACHINES[MACHINE], yes=1), kill, number]
    program += [instruction(at_least, FIRST_UNKNOWN, no=1), absent]
    for names, answer in ((REFUSED.split(), refuse), (ABSENT, absent)):
        for name in names:
            if name in NUMBERS:
                program += [instruction(equal, NUMBERS[name], no=1), answer]
    program += [instruction(equal, NUMBERS["clone"], no=4), instruction(load, 16)]
    program += [instruction(any_bit, MAKE_THREAD, yes=1), refuse, allow]
    for name, (argument, values) in only.items():
        tests = [instruction(equal, value, yes=len(values) - place) for place, value in enumerate(values)]
        program += [instruction(equal, NUMBERS[name], no=len(values) + 3), instruction(load, 16 + 8 * argument)]
        program += [*tests, refuse, allow]
    return b"".join([*program, allow])
