"""The shipped tools: right answers, and refusals that the model can read."""

import importlib

import pytest

from mindrlhf.environments.pool import EnvironmentPool
from mindrlhf.environments.protocol import READY, build, load
from mindrlhf.environments.ready.calculator import calculator
from mindrlhf.environments.ready.code_interpreter import code_interpreter
from mindrlhf.environments.ready.games import GAMES
from mindrlhf.environments.ready.sqlite import sqlite

SUMS = {
    "2 + 3*4": "14",
    "(2+3)*-4": "-20",
    "7/2": "3.5",
    "0.1+0.2": "0.3",
    "1/3": "0.333333333333",
    "2**10 % 7": "2",
    "17 // 5": "3",
    "1,234,567 × 2 ÷ 2": "1234567",
    "2^0.5": "1.41421356237",
    " 3 − 5 ": "-2",
    "2**-2": "0.25",
    "9**99": str(9**99),
}
NO_SUMS = {
    "1/0": "Fraction",
    "9**9999": "power is too large",
    "(10**700)*(10**700)": "number is too large",
    "0.5**99999": "power is too large",
    "(-8)**0.5": "no real number",
    "1e99999": "Invalid literal",
    "x + 1": "more than numbers",
    "__import__('os')": "more than numbers",
    "True + 1": "more than numbers",
    "3 +": "cannot be read",
    "": "cannot be read",
    "(" * 150 + "1": "cannot be read",
    "1+" * 150 + "1": "longer than 200",
}


@pytest.mark.parametrize("text", SUMS)
def test_the_calculator(text):
    assert calculator(text) == SUMS[text]


@pytest.mark.parametrize("text", NO_SUMS)
def test_what_the_calculator_refuses(text):
    with pytest.raises((ValueError, ArithmeticError), match=NO_SUMS[text]):
        calculator(text)


RUNS = {
    "print(1)\n2 + 3": "1\n5",
    "x = 5": "",
    "None": "",
    "": "",
    "'text'": "text",
    "import numpy\nnumpy.arange(4).sum()": "6",
    "open('a.txt', 'w').write('b')\nprint(open('a.txt').read())": "b",
    "import tempfile\ntempfile.TemporaryFile().write(b'abc')": "3",
    "import sys\nsys.exit('bye')": "bye",
    "def f(x):\n    return f(x - 1) + x if x else 0\nf(10)": "55",
    "import sys\nlen(sys.argv)": "1",
    "import asyncio, threading\nasyncio.run(asyncio.to_thread(threading.active_count))": "2",
    "import shutil\nopen('a', 'w').write('b')\nshutil.copyfile('a', 'c')": "c",
    "import os\nos.listdir('.')": "[]",
    "import sqlite3\nsqlite3.connect(':memory:').execute('select 2').fetchone()": "(2,)",
}
# program -> the last line of what it prints
STOPPED = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "def f(": "SyntaxError: '(' was never closed",
    "input()": "EOFError: EOF when reading a line",
    "import socket\nsocket.create_connection(('127.0.0.1', 9))": "PermissionError: the sandbox allows no network",
    "import socket\nsocket.getaddrinfo('localhost', 80)": "PermissionError: the sandbox allows no network",
    "open('../outside', 'w')": "PermissionError: the sandbox allows no writing outside of its folder",
    "import os\nos.open('/tmp/x', os.O_CREAT)": "PermissionError: the sandbox allows no writing outside of its folder",
    "import os\nos.rename('a', '/tmp/b')": "PermissionError: the sandbox allows no writing outside of its folder",
    "import sqlite3\nsqlite3.connect('/tmp/b')": "PermissionError: the sandbox allows no writing outside of its folder",
    "import os\nfor _ in range(5): os.fork()": "PermissionError: the sandbox allows no other processes",
    "import os\nos.system('true')": "PermissionError: the sandbox allows no other processes",
    "import subprocess\nsubprocess.run(['true'])": "PermissionError: the sandbox allows no other processes",
    "import os\nos.kill(os.getppid(), 9)": "PermissionError: the sandbox allows no other processes",
    "import ctypes\nctypes.CDLL(None).fork()": "PermissionError: the sandbox allows no native functions",
    "import os\nos.abort()": "The program was ended by signal 6 (Aborted).",
}


@pytest.mark.parametrize("code", RUNS)
def test_the_code_interpreter(code):
    assert code_interpreter(code) == RUNS[code]


@pytest.mark.parametrize("code", STOPPED)
def test_what_the_sandbox_stops(code):
    text = code_interpreter(code)
    assert text.splitlines()[-1] == STOPPED[code]
    assert "sandbox.py" not in text


def test_limits_of_the_pool_hold_in_the_sandbox():
    programs = {
        "while True: pass": "it took longer than 3 s",
        "import time\ntime.sleep(1000)": "it took longer than 3 s",
        "len(bytearray(1 << 32))": "MemoryError",
        "print('x' * (1 << 26))": "xxx",
        "1 + 1": "2",
    }
    with EnvironmentPool({"": ""}, ["python"], timeout_s=3.0, memory_mb=512, max_output=2000) as pool:
        pool.reset((0,), "", {})
        pool.collect(wait_for_one=True)
        pool.call((0,), [("code_interpreter", {"code": code}) for code in programs])
        (outcome,) = pool.collect(wait_for_one=True)
    for answer, expected in zip(outcome.answers, programs.values(), strict=True):
        assert expected in (answer.failure or answer.value)
        assert len(answer.failure or answer.value) < 2100
    assert [bool(answer.failure) for answer in outcome.answers] == [True, True, False, False, False]


def test_the_database():
    assert "CREATE TABLE customers" in sqlite("SELECT sql FROM sqlite_master")
    assert sqlite("SELECT name, price FROM products WHERE kind = 'pot' ORDER BY price") == (
        "name | price\nclay pot | 640\nlarge pot | 1420"
    )
    total = 'SELECT sum(price * count) AS spent FROM items JOIN products ON product = products.id WHERE "order" = 1'
    assert sqlite(total) == "spent\n3950"
    assert "(only the first 50 rows)" in sqlite("SELECT * FROM items a, items b")


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE items",
        "DELETE FROM items",
        "ATTACH '/tmp/x' AS x",
        "PRAGMA journal_mode",
        "SELECT * FROM missing",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n",
    ],
)
def test_queries_that_are_refused(query):
    before = sqlite("SELECT count(*) FROM items")
    with pytest.raises(Exception, match=r"not authorized|no such table|one statement|interrupted") as caught:
        sqlite(query)
    assert type(caught.value).__module__ == "sqlite3"
    assert sqlite("SELECT count(*) FROM items") == before


def test_every_game_has_a_name():
    assert {load("environment", name) for name in GAMES} == set(GAMES.values())


@pytest.mark.parametrize("name", READY)
def test_each_ready_part_loads(name):
    made = load("environment", name)
    environment = build(made, {}) if isinstance(made, type) else build(None, {made.__name__: made})
    assert environment.raw == isinstance(made, type)
    assert len(environment.schemas) == (not environment.raw)
    assert made.__module__ in READY[name]
    assert importlib.import_module(made.__module__).__doc__
