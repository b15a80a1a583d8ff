"""Reward functions that do everything a reward function should not; run in reward processes only."""

import ctypes
import json
import math
import os
import signal
import sys
import threading
import time


def answer(text, descriptors=range(3, 20)):
    """Write to whatever may be the pipe of replies."""
    for descriptor in descriptors:
        try:
            os.write(descriptor, text.encode() + b"\n")
        except OSError:
            continue


def forked(prompt, completion, fields):
    """Every call forks; its child returns another score, raises, or exits."""
    child = ctypes.CDLL(None).fork() if completion == "c" else os.fork()
    if child:
        os.waitpid(child, 0)
        return 1.0
    match completion:
        case "raises":
            raise ValueError("in the child")
        case "exits":
            sys.exit(5)
        case "answers":
            answer("[0,7.0,{},0.0,null]")
    return 99.0


def many(prompt, completion, fields):
    return {"score": 1.0, **{f"part {place}": float(place) for place in range(int(completion))}}


def twice(prompt, completion, fields):
    """Some calls are answered a second time, by a thread that comes later."""
    if completion == "later":
        threading.Timer(0.2, answer, ["[0,9.0,{},0.0,null]"]).start()
    elif completion == "now":
        answer("[0,9.0,{},0.0,null]")
        answer("[0,9.0,{},0.0,null]")
    else:
        time.sleep(float(completion) / 100)
        return float(completion)
    return 0.5


def fault(prompt, completion, fields):
    match completion:
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.system(f"sleep {fields.get('sleep', 1000)}")
        case "raise":
            raise ValueError("what " + "x" * 10_000_000)
        case "bad text":

            class Nasty(Exception):
                def __str__(self):
                    raise RuntimeError

            raise Nasty
        case "interrupt":
            raise KeyboardInterrupt
        case "recurse":
            return fault(prompt, completion, fields)
        case "nan":
            return math.nan
        case "inf":
            return -math.inf
        case "huge":
            return 1e39
        case "text":
            return "1.0"
        case "list":
            return [1.0]
        case "no score":
            return {"acc": 1.0}
        case "print":
            print("x" * 10_000_000)
            print("y" * 10_000_000, file=sys.stderr)
            os.write(1, b"z" * 10_000_000)
            return 1.5
        case "read":
            return float(len(sys.stdin.read()))
        case "exit":
            sys.exit(3)
        case "os exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "close":
            os.closerange(3, 100)
            return 1.0
        case "close and hang":
            os.closerange(3, 100)
            time.sleep(1000)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "memory":
            return len([0] * 10**15)
        case "deep":
            answer("[" * 100_000)
        case "other kinds":
            answer('["0",1.0,{},0.0,null]')
        case "beyond":
            answer("[1000000,1.0,{},0.0,null]")
        case "not finite":
            frame = sys._getframe()
            while "number" not in frame.f_locals:
                frame = frame.f_back
            answer(f"[{frame.f_locals['number']},NaN,{{}},0.0,null]")
        case "long list":
            return [1.0] * 3_000_000
        case "bare name":
            return {"score": 1.0, "half \ud800": 2.0}
        case "escape name":
            return {"score": 1.0, "\x1b[31mred": 2.0}
        case "long name":
            return {"score": 1.0, "x" * 1000: 2.0}
        case "bad message":
            raise ValueError("half \ud800, red \x1b[31m, two\nlines")
        case "numpy":
            import numpy

            return {"score": numpy.float64(2.0), "count": numpy.int64(3)}
        case "patch":
            import mindrlhf.rewards.worker as worker

            worker.outcome = worker.time.perf_counter = json.loads = None
        case "thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            return 1.25
        case "scribble":
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, b"scribble\n")
                except OSError:
                    continue
            return 1.0
        case "mutate":
            fields["ground_truth"] = "other"
        case "none":
            return None
        case "parts":
            return {"score": True, "length": 4, "ratio": 0.25}
        case "only parts":
            return {"score": None, "length": 8}
    return float(completion)


def constant(prompt, completion, fields, value=1.0):
    return value


def doze(prompt, completion, fields):
    time.sleep(float(fields["seconds"]))
    return float(completion)


def loaded(prompt, completion, fields):
    return float(fields["module"] in sys.modules)


def process(prompt, completion, fields):
    return float(os.getpid())
