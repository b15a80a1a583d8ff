"""Programs that try to leave the sandbox: for each escape a line with ESCAPED, or with what has refused it.

`PRELUDE` switches Python's own checks off, so that the kernel alone holds. `AIM` has things outside: a process, files,
a folder, a port. Signals to more than one process are number 0.
"""

import textwrap

PRELUDE = """
import ctypes, fcntl, os, resource, signal, socket, struct, sys
AIM = AIMS
import mindrlhf.environments.ready.sandbox as sandbox
sandbox.REFUSED.clear(); sandbox.CHANGING.clear(); sandbox.WRITING = 0
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
def call(x86, arm, *values):
    if ARM and arm is None: raise OSError("not on this machine")
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result = libc.syscall(ctypes.c_long(arm if ARM else x86), *values)
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def child(number):
    if number == 0:
        import time
        time.sleep(60); os._exit(0)
"""
ATTEMPT = """
def attempt():
    BODY
try:
    attempt()
except BaseException as error:
    print("NAME: refused:", type(error).__name__, str(error).replace(chr(10), " "))
else:
    print("NAME: ESCAPED")
"""

PROCESSES = {
    "leave the session": "os.setsid()",
    "leave the group": "os.setpgid(0, 0)",
    "join another group": "os.setpgid(0, os.getpgid(os.getppid()))",
    "fork": "child(os.fork())",
    "fork in C": "pid = libc.fork(); child(pid)\nif pid < 0: raise OSError(ctypes.get_errno(), 'fork')",
    "fork twice": "pid = os.fork()\nif pid == 0: os.setsid(); child(os.fork()); os._exit(0)",
    "clone": "child(call(56, 220, signal.SIGCHLD, 0, 0, 0, 0))",
    "clone3": "child(call(435, 435, struct.pack('8Q', 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64))",
    "spawn": "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
    "subprocess again": (
        "sys.modules.pop('_posixsubprocess'); sys.modules.pop('subprocess', None)\n"
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    ),
    "become another program": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "outlive the parent": "\nif libc.prctl(1, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'prctl')",
    "adopt": "\nif libc.prctl(36, 1, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'prctl')",
    "new users": "call(272, 97, 0x10000000)",
    "new processes' names": "call(272, 97, 0x20000000)",
    "namespaces of another": "call(308, 268, os.open(f'/proc/{AIM[\"process\"]}/ns/mnt', 0), 0)",
}
OTHERS = {
    "kill": "os.kill(AIM['process'], signal.SIGKILL)",
    "kill all": "os.kill(-1, 0)",
    "kill the group": "os.killpg(0, 0)",
    "kill the parent": "os.kill(os.getppid(), 0)",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(AIM['process']), signal.SIGKILL)",
    "tkill": "call(200, 130, AIM['process'], signal.SIGKILL)",
    "tgkill": "call(234, 131, AIM['process'], AIM['process'], signal.SIGKILL)",
    "queue a signal": "call(129, 138, AIM['process'], signal.SIGKILL, struct.pack('3i116x', signal.SIGKILL, 0, -1))",
    "signal by a pipe": (
        "reading, writing = os.pipe()\n"
        "fcntl.fcntl(reading, fcntl.F_SETOWN, AIM['process']); fcntl.fcntl(reading, 10, int(signal.SIGKILL))\n"
        "fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC); os.write(writing, b'x')"
    ),
    "trace": "call(101, 117, 16, AIM['process'], 0, 0)",
    "read memory": (
        "text = ctypes.create_string_buffer(8)\n"
        "there = struct.pack('PN', 0x400000, 8); here = struct.pack('PN', ctypes.addressof(text), 8)\n"
        "call(310, 270, AIM['process'], here, 1, there, 1, 0)"
    ),
    "limits": "resource.prlimit(AIM['process'], resource.RLIMIT_NOFILE, (5, 5))",
    "priority": "os.setpriority(os.PRIO_PROCESS, AIM['process'], 19)",
    "priority of the group": "os.setpriority(os.PRIO_PGRP, 0, 19)",
    "cores": "os.sched_setaffinity(AIM['process'], {0})",
    "scheduler": "os.sched_setscheduler(AIM['process'], os.SCHED_IDLE, os.sched_param(0))",
    "priority of disks": "call(251, 30, 1, AIM['process'], 3 << 13)",
    "compare": "call(312, 272, os.getpid(), AIM['process'], 2, 0, 0)",
    "memory's file": "open(f'/proc/{AIM[\"process\"]}/mem', 'r+b').close()",
    "who ends first": "open(f'/proc/{AIM[\"process\"]}/oom_score_adj', 'w').write('1000')",
    "performance counters": "call(298, 241, struct.pack('II112x', 1, 120), AIM['process'], -1, -1, 0)",
}
FILES = {
    "write": "open(AIM['file'], 'w').write('x')",
    "append": "open(AIM['file'], 'a').write('x')",
    "write through a link": "os.symlink(AIM['file'], 'link'); open('link', 'w').write('x')",
    "write through a hard link": "os.link(AIM['file'], 'link'); open('link', 'w').write('x')",
    "truncate": "os.truncate(AIM['file'], 0)",
    "remove": "os.remove(AIM['file'])",
    "remove by a folder": "os.unlink('file', dir_fd=os.open(AIM['folder'], os.O_PATH))",
    "move in": "os.rename(AIM['file'], 'file')",
    "move out": "open('file', 'w').close(); os.rename('file', AIM['folder'] + '/moved')",
    "make": "open(AIM['folder'] + '/made', 'x').close()",
    "make a folder": "os.mkdir(AIM['folder'] + '/made')",
    "make a pipe": "os.mkfifo(AIM['folder'] + '/made')",
    "make a device": "os.mknod('device', 0o20600, os.makedev(1, 1))",
    "make beside": "open('../made', 'x').close()",
    "climb": "os.makedirs('a/b'); os.chdir('a/b'); open('../../../../../../..' + AIM['folder'] + '/made', 'x').close()",
    "shared memory": "open('/dev/shm/mindrlhf-escape', 'x').close()",
    "python's folder": "open(sys.prefix + '/mindrlhf-escape', 'x').close()",
    "database": (
        "import sqlite3\n"
        "sqlite3.connect(':memory:', isolation_level=None).executescript("
        "\"ATTACH '\" + AIM['folder'] + \"/made' AS x; CREATE TABLE x.t (a)\")"
    ),
    "rights": "os.chmod(AIM['file'], 0o777)",
    "rights by a folder": "os.chmod('file', 0o777, dir_fd=os.open(AIM['folder'], os.O_PATH))",
    "rights of what is read": "fd = os.open(os.__file__, 0); os.fchmod(fd, os.fstat(fd).st_mode & 0o7777)",
    "times of what is read": "os.utime(os.open(os.__file__, 0), ns=(1, os.stat(os.__file__).st_mtime_ns))",
    "owner of what is read": "fd = os.open(os.__file__, 0); os.fchown(fd, os.getuid(), os.getgid())",
    "attributes of what is read": "os.setxattr(os.open(os.__file__, 0), 'user.escape', b'')",
    "flags of what is read": (
        "fd = os.open(os.__file__, 0); flags = bytearray(8)\n"
        "fcntl.ioctl(fd, 0x80086601, flags); fcntl.ioctl(fd, 0x40086602, bytes(flags))"
    ),
    "new rights": "call(452, 452, -100, AIM['file'].encode(), 0o777, 0)",
    "mount": "call(165, 40, b'tmpfs', os.getcwdb(), b'tmpfs', 0, None)",
    "another root": "os.chroot('.')",
    "file by its handle": "call(304, 265, os.open('/', os.O_PATH), struct.pack('Ii8x', 8, 1), 0)",
}
SECRETS = {
    "key": "print(open(AIM['secret']).read())",
    "key by a link": "os.symlink(AIM['secret'], 'link'); print(open('link').read())",
    "answers": "print(open(AIM['file']).read())",
    "list": "print(os.listdir(AIM['folder']))",
    "passwords": "print(open('/etc/passwd').read())",
    "environment of another": "print(open(f'/proc/{AIM[\"process\"]}/environ').read())",
    "environment of the parent": "print(open(f'/proc/{os.getppid()}/environ').read())",
    "command of another": "print(open(f'/proc/{AIM[\"process\"]}/cmdline').read())",
    "descriptors": (
        "found = []\n"
        "for number in range(3, 64):\n"
        "    try: found.append(os.fstat(number))\n"
        "    except OSError: pass\n"
        "if not found: raise OSError('none is open')"
    ),
    "variables": "\nif 'ESCAPE_TOKEN' not in os.environ: raise KeyError('ESCAPE_TOKEN')",
    "keys of the kernel": "call(250, 219, 0, -4, 1)",
}
NETWORK = {
    "connect": "socket.create_connection(('127.0.0.1', AIM['port']), 1)",
    "connect in C": "call(41, 198, 2, 1, 0)",
    "datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', AIM['port']))",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "local socket": "call(41, 198, 1, 1, 0)",
    "local datagram": "call(53, 199, 1, 2, 0, ctypes.create_string_buffer(8))",
    "raw": "call(41, 198, 17, 3, 0)",
    "netlink": "call(41, 198, 16, 3, 0)",
    "ring of calls": "call(425, 425, 4, ctypes.create_string_buffer(120))",
}
REMAINS = {
    "shared memory of the system": "call(29, 194, 0x4D494E44, 4096, 0o1600)",
    "queue of the system": "call(68, 186, 0x4D494E44, 0o1600)",
    "shared memory of another": "call(30, 196, AIM['segment'], 0, 0)",
    "shared memory of another, removed": "call(31, 195, AIM['segment'], 0, 0)",
    "queue of another": "call(69, 189, AIM['messages'], struct.pack('l', 1), 0, 0)",
    "queue of another, removed": "call(71, 187, AIM['messages'], 0, 0)",
    "semaphores of another": "call(66, 191, AIM['semaphores'], 0, 0, 0)",
    "queue's name": "call(241, 181, b'mindrlhf-absent')",
    "queue": "call(240, 180, b'mindrlhf-escape', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "file without a name": "call(319, 279, b'x', 0)",
    "higher limit of files": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "higher limit of time": "resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)",
    "large file": "open('large', 'wb').truncate(1 << 30)",
    "programs in the kernel": "call(321, 280, 0, struct.pack('4I112x', 1, 4, 4, 1), 128)",
    "faults": "call(323, 282, 0)",
    "privileges": (
        "libc.prctl(8, 1, 0, 0, 0)\n"
        "call(126, 91, struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0xFFFFFFFF] * 6))"
    ),
    "kernel's messages": "call(103, 116, 3, ctypes.create_string_buffer(64), 64)\nopen('/dev/kmsg')",
}
OFF = (
    "import os\nimport mindrlhf.environments.ready.sandbox as sandbox\nsandbox.CHANGING.clear(); sandbox.WRITING = 0\n"
)
KINDS = {
    "processes": PROCESSES,
    "others": OTHERS,
    "files": FILES,
    "secrets": SECRETS,
    "network": NETWORK,
    "remains": REMAINS,
}
NAMES = [f"{kind}: {name}" for kind, bodies in KINDS.items() for name in bodies]


def programs(aims: dict[str, object]) -> list[str]:
    """Write a program for each kind, which tries one escape after the other."""
    return [
        PRELUDE.replace("AIMS", repr(aims))
        + "".join(
            ATTEMPT.replace("    BODY", textwrap.indent(body.strip(), "    ")).replace("NAME", f"{kind}: {name}")
            for name, body in bodies.items()
        )
        for kind, bodies in KINDS.items()
    ]


# Programs that go on until they are ended: name -> code, and a pattern of the answer.
STAY = {
    "loop": ("while True: pass", "it took longer"),
    "loop in C": ("9 ** 9 ** 9", "it took longer"),
    "sleep without output": ("import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)", "it took longer"),
    "threads": (
        "import threading, time\n[threading.Thread(target=time.sleep, args=(1000,)).start() for _ in range(20)]",
        "it took longer",
    ),
    "deaf": (
        "import signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        "it took longer",
    ),
    "stopped": ("import signal\nsignal.raise_signal(signal.SIGSTOP)", "it took longer"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError|it took longer"),
    "many threads": (
        "import threading\nthreading.stack_size(1 << 15)\nwait = threading.Event()\n"
        "while True: threading.Thread(target=wait.wait, daemon=True).start()",
        "can't start new thread|it took longer",  # root has no limit of threads but that of memory
    ),
}
# Programs that write until they are ended.
FLOODS = {
    "empty files": "n = 0\nwhile True:\n    open(str(n), 'x').close(); n += 1",
    "full files": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 23)); n += 1",
    "deep folders": "while True:\n    os.mkdir('d'); os.chdir('d')",
    "hidden folders": "os.umask(0); os.mkdir('d', 192); os.chdir('d'); n = 0\nwhile True: os.mkdir(str(n), 0); n += 1",
    "output": "while True: print('x' * 1000000)",
}
