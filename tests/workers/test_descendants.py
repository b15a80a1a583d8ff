"""Processes that leave their parents are adopted, waited for and ended."""

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has adoption of orphans")


def run(body: str) -> str:
    """Run a program in a process of its own, which adopts."""
    program = f"import os, subprocess, sys, time\nfrom mindrlhf.workers.descendants import *\nadopt_orphans()\n{body}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_adopted_orphans_do_not_stay_as_zombies():
    """Nor does a function lose the exit code of the child that it still waits for."""
    text = run(
        "for _ in range(40): subprocess.run(['sh', '-c', 'true & true & exit 0'])\n"
        "own = subprocess.Popen(['sh', '-c', 'exit 7'])\n"
        "while len(children()) < 81: time.sleep(0.01)\n"
        "while not os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT): time.sleep(0.01)\n"
        "while True:\n"
        "    collect_dead(8)\n"
        "    if len(children()) == 8: break\n"
        "print(own.wait())\n"
    )
    assert text == "7\n"


def test_children_end_layer_by_layer():
    """In sessions of their own, deaf to what can be ignored; those to keep go on."""
    inner = "setsid sh -c \\\"trap '' TERM HUP INT; setsid sleep 98767 & sleep 98767\\\" & sleep 98767"
    text = run(
        f"subprocess.Popen(['sh', '-c', \"{inner}\"])\n"
        "kept = subprocess.Popen(['sleep', '98767'])\n"
        "time.sleep(0.5)\n"
        "while end_children({kept.pid}): time.sleep(0.01)\n"
        "print(children() == [kept.pid])\n"
        "end_all_children(10.0)\n"
        "print(children())\n"
    )
    assert text == "True\n[]\n"
    assert [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98767"]] == []


def test_marked_processes_end_with_their_descendants():
    """Also without the mark in the environment of a descendant, and with another parent."""
    text = run(
        "one = {**os.environ, MARK: 'one'}\n"
        "marked = subprocess.Popen(['sh', '-c', 'env -i sleep 98768 & wait'], env=one, start_new_session=True)\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 98768 & exit'], env=one)\n"
        "other = subprocess.Popen(['sleep', '98768'], env={**os.environ, MARK: 'other'})\n"
        "time.sleep(0.5)\n"
        "end_marked('one')\n"
        "while len([number for number in children() if number not in (other.pid,)]) > 0: collect_dead(0)\n"
        "print(other.poll())\n"
        "other.kill()\n"
        "other.wait()\n"
    )
    assert text == "None\n"
    assert [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "98768"]] == []
