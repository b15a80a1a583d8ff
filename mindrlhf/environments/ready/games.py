"""Games in text for one player, seeded, with rewards from 0 to 1."""

import math
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

MOVE = re.compile(r"<move>\s*(.*?)\s*</move>", re.DOTALL)
WORDS = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Game(ABC):
    """Game with moves between `<move>` and `</move>`; the last move of a turn counts.

    rules: for the player. turns: the largest number of turns. reward: of the present state.
    """

    rules: str
    turns: int
    reward = 0.0

    def reset(self, seed: str = "0", question: str = "", **row: str) -> str | None:
        """Begin; returns rules and start, or None if the question contains them already."""
        self.left = self.turns
        self.over = False
        opening = f"{self.rules} Write each move between <move> and </move>.\n\n{self.start(random.Random(seed))}"
        return None if opening in question else opening

    def reply(self, text: str) -> str | None:
        """Play a turn; None ends the game."""
        moves = MOVE.findall(text)
        self.left -= 1
        answer = self.play(moves[-1].lower()) if moves else "There is no <move> in your turn."
        return None if self.over or self.left <= 0 else answer

    def get_reward(self) -> float:
        return self.reward

    @abstractmethod
    def start(self, draw: random.Random) -> str:
        """Draw a game and describe it."""

    @abstractmethod
    def play(self, move: str) -> str:
        """Make a move and describe the outcome."""


class NumberGuessing(Game):
    """Number from 1 to 100, to be found by guesses; reward 1."""

    rules = "I think of a whole number from 1 to 100. You have 7 guesses; I say whether it is larger or smaller."
    turns = 7

    def start(self, draw: random.Random) -> str:
        self.number = draw.randint(1, 100)
        return "What is your first guess?"

    def play(self, move: str) -> str:
        if not re.fullmatch("[0-9]{1,3}", move):
            return "That is no whole number from 1 to 100."
        self.over = int(move) == self.number
        self.reward = float(self.over)
        return f"My number is {'larger' if self.number > int(move) else 'smaller'} than {move}."


class Wordle(Game):
    """Hidden word of five letters; reward 1, or 0.05 for each letter in place."""

    rules = (
        "Find the English word of five letters in 6 guesses. For each letter of a guess I write G if it is in its "
        "place, Y if the word has it elsewhere, and - if not."
    )
    turns = 6

    def start(self, draw: random.Random) -> str:
        self.word = draw.choice(WORDS)
        return "What is your first guess?"

    def play(self, move: str) -> str:
        if not re.fullmatch("[a-z]{5}", move):
            return "That is no word of five letters."
        places = [guessed == letter for guessed, letter in zip(move, self.word, strict=True)]
        others = Counter(letter for letter, placed in zip(self.word, places, strict=True) if not placed)
        marks = ""
        for guessed, placed in zip(move, places, strict=True):
            found = not placed and others[guessed] > 0
            others[guessed] -= found
            marks += "G" if placed else "Y" if found else "-"
        self.over = all(places)
        self.reward = 1.0 if self.over else max(self.reward, 0.05 * sum(places))
        return f"{move}: {marks}"


class Maze(Game):
    """Maze of 4 by 4 rooms without circles; reward 1 at the exit."""

    rules = "Find the way through a maze from @ to X; # is wall. A move is up, down, left or right, by one place."
    turns = 60
    size = 4

    def start(self, draw: random.Random) -> str:
        side = 2 * self.size + 1
        self.map = [["#"] * side for _ in range(side)]
        self.place = (1, 1)
        path = [(1, 1)]
        self.map[1][1] = " "
        while path:
            row, column = path[-1]
            ways = [way for way in STEPS.values() if self._at(row + 2 * way[0], column + 2 * way[1]) == "#"]
            if not ways:
                path.pop()
                continue
            down, right = draw.choice(ways)
            self.map[row + down][column + right] = self.map[row + 2 * down][column + 2 * right] = " "
            path.append((row + 2 * down, column + 2 * right))
        self.map[-2][-2] = "X"
        return self._drawn()

    def play(self, move: str) -> str:
        if move not in STEPS:
            return "A move is up, down, left or right."
        target = tuple(here + step for here, step in zip(self.place, STEPS[move], strict=True))
        if self._at(*target) == "#":
            return f"There is a wall.\n{self._drawn()}"
        self.place = target
        self.over = self._at(*target) == "X"
        self.reward = float(self.over)
        return self._drawn()

    def _at(self, row: int, column: int) -> str:
        inside = 0 <= row < len(self.map) and 0 <= column < len(self.map)
        return self.map[row][column] if inside else ""

    def _drawn(self) -> str:
        rows = [list(row) for row in self.map]
        rows[self.place[0]][self.place[1]] = "@"
        return "\n".join("".join(row) for row in rows)


class Game2048(Game):
    """Sliding tiles that double; reward is log2 of the largest tile, 1 from 2048."""

    rules = "Play 2048: a move (up, down, left or right) slides all tiles, and equal ones join. Make a large tile."
    turns = 100

    def start(self, draw: random.Random) -> str:
        self.draw = draw
        self.board = [[0] * 4 for _ in range(4)]
        self._add()
        self._add()
        return self._drawn()

    def play(self, move: str) -> str:
        if move not in STEPS:
            return "A move is up, down, left or right."
        board = self._moved(move)
        if board == self.board:
            return f"Nothing moves that way.\n{self._drawn()}"
        self.board = board
        self._add()
        self.over = all(self._moved(way) == self.board for way in STEPS)
        return self._drawn()

    def _moved(self, move: str) -> list[list[int]]:
        upright = move in ("up", "down")
        back = move in ("down", "right")
        rows = [list(row) for row in zip(*self.board, strict=True)] if upright else self.board
        rows = [_slid(row[::-1])[::-1] if back else _slid(row) for row in rows]
        return [list(row) for row in zip(*rows, strict=True)] if upright else rows

    def _add(self) -> None:
        row, column = self.draw.choice(
            [(row, column) for row in range(4) for column in range(4) if not self.board[row][column]]
        )
        self.board[row][column] = 4 if self.draw.random() < 0.1 else 2
        self.reward = min(1.0, math.log2(max(map(max, self.board))) / 11)

    def _drawn(self) -> str:
        return "\n".join(" ".join(f"{tile or '.':>4}" for tile in row) for row in self.board)


class TicTacToe(Game):
    """Tic-tac-toe against a fixed player; reward 1, or 0.5 for a draw."""

    rules = "Play tic-tac-toe: you are X, I am O, and a move is the number of a free place."
    turns = 9
    lines = ("123", "456", "789", "147", "258", "369", "159", "357")

    def start(self, draw: random.Random) -> str:
        self.draw = draw
        self.board = list("123456789")
        if draw.random() < 0.5:
            self._answer()
        return self._drawn()

    def play(self, move: str) -> str:
        if move not in self.board or move in "XO":
            return f"That is no free place.\n{self._drawn()}"
        self.board[int(move) - 1] = "X"
        if not self._ended():
            self._answer()
            self._ended()
        return self._drawn()

    def _answer(self) -> None:
        """Win, or else prevent a win, or else take any place."""
        free = [place for place in self.board if place.isdigit()]
        places = [*self._open("O"), *self._open("X"), self.draw.choice(free)]
        self.board[int(places[0]) - 1] = "O"

    def _ended(self) -> bool:
        rows = self._rows()
        won, lost = (mark * 3 in rows for mark in "XO")
        full = not any(place.isdigit() for place in self.board)
        self.over = won or lost or full
        self.reward = 1.0 if won else 0.5 if full and not lost else 0.0
        return self.over

    def _open(self, mark: str) -> Iterator[str]:
        """Yield the places that complete a row of `mark`."""
        for row in self._rows():
            if row.count(mark) == 2 and (free := row.replace(mark, "")).isdigit():
                yield free

    def _rows(self) -> list[str]:
        return ["".join(self.board[int(place) - 1] for place in line) for line in self.lines]

    def _drawn(self) -> str:
        return "\n".join(" ".join(self.board[start : start + 3]) for start in (0, 3, 6))


def _slid(row: Sequence[int]) -> list[int]:
    """Slide a row of 2048 to its beginning."""
    tiles: list[int] = []
    joined = False
    for tile in filter(None, row):
        joined = bool(tiles) and tiles[-1] == tile and not joined
        if joined:
            tiles[-1] *= 2
        else:
            tiles.append(tile)
    return tiles + [0] * (len(row) - len(tiles))


GAMES = {
    "number_guessing": NumberGuessing,
    "wordle": Wordle,
    "maze": Maze,
    "game_2048": Game2048,
    "tic_tac_toe": TicTacToe,
}


def generate(count: int, seed: int, name: str) -> list[dict[str, str]]:
    """Generate `count` games as source rows `{question, environment, seed}` of the task `game`."""
    seeds = [f"{seed} {number}" for number in range(count)]
    return [{"question": GAMES[name]().reset(each), "environment": name, "seed": each} for each in seeds]
