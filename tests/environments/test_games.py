"""The games by their rules: players that know how win, and the same seed is the same game."""

import random
import re

import pytest

from mindrlhf.environments.ready.games import GAMES, STEPS, WORDS, Game2048, Maze, NumberGuessing, TicTacToe, Wordle


def begun(made, seed="0"):
    game = made()
    return game, game.reset(seed=seed, task="other")


def play(game, move):
    return game.reply(f"I try <move>{move}</move>")


def moves_of(made):
    return {
        NumberGuessing: [str(number) for number in range(1, 101)],
        Wordle: WORDS,
        TicTacToe: list("123456789"),
    }.get(made, list(STEPS))


@pytest.mark.parametrize("made", GAMES.values())
def test_seeds_and_any_moves(made):
    """Same seed and moves, same texts; the reward is from 0 to 1, and the game ends by the limit of turns."""
    starts = set()
    for seed in range(20):
        texts = []
        for _ in range(2):
            game, text = begun(made, str(seed))
            draw, answers = random.Random(seed), [text]
            while answers[-1] is not None:
                move = draw.choice([*moves_of(made), "nonsense", "", "5"])
                answers.append(play(game, move))
                assert 0.0 <= game.get_reward() <= 1.0
                assert len(answers) <= made.turns + 1
            texts.append(answers)
        assert texts[0] == texts[1]
        starts.add(texts[0][0])
    assert len(starts) > 1 or made in (NumberGuessing, Wordle)


@pytest.mark.parametrize("made", GAMES.values())
def test_openings(made):
    """The text is said once: by the row's question, or by reset; a turn without a move costs a turn."""
    game, text = begun(made, "7")
    assert "<move>" in text
    assert made().reset(seed="7", question=f"Play.\n{text}") is None
    assert game.reply("I think about it.") == "There is no <move> in your turn."
    assert game.left == made.turns - 1
    assert play(game, "nonsense") is not None


def test_number_guessing_by_halves():
    for seed in range(30):
        game, answer = begun(NumberGuessing, str(seed))
        low, high = 1, 100
        while answer is not None:
            guess = (low + high) // 2
            answer = play(game, guess)
            if answer and "larger" in answer:
                low = guess + 1
            else:
                high = guess - 1
        assert game.get_reward() == 1.0


def test_wordle_marks():
    game, _ = begun(Wordle)
    game.word = "robot"
    assert play(game, "ROOMS") == "rooms: GGY--"
    assert play(game, "otter") == "otter: YY--Y"
    assert game.get_reward() == pytest.approx(0.1)
    assert play(game, "robot") is None
    assert game.get_reward() == 1.0
    assert all(re.fullmatch("[a-z]{5}", word) for word in WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_every_maze_has_a_way():
    for seed in range(20):
        game, text = begun(Maze, str(seed))
        grid = text.split("\n\n")[-1].splitlines()
        assert [len(row) for row in grid] == [9] * 9
        (start,) = [(r, c) for r, row in enumerate(grid) for c, place in enumerate(row) if place == "@"]
        ways, queue = {start: []}, [start]
        for place in queue:
            for name, (down, right) in STEPS.items():
                following = place[0] + down, place[1] + right
                if grid[following[0]][following[1]] != "#" and following not in ways:
                    ways[following] = [*ways[place], name]
                    queue.append(following)
        assert len(ways) == 2 * 16 - 1  # without circles: a door less than rooms
        (way,) = [moves for (r, c), moves in ways.items() if grid[r][c] == "X"]
        answers = [play(game, move) for move in way]
        assert answers[-1] is None
        assert None not in answers[:-1]
        assert game.get_reward() == 1.0
    game, _ = begun(Maze)
    assert play(game, "up").startswith("There is a wall.")
    assert game.get_reward() == 0.0


def test_2048_slides_and_joins():
    game, _ = begun(Game2048)
    game.board = [[2, 2, 4, 4], [2, 0, 2, 4], [0, 0, 0, 2], [2, 2, 2, 2]]
    assert game._moved("left") == [[4, 8, 0, 0], [4, 4, 0, 0], [2, 0, 0, 0], [4, 4, 0, 0]]
    assert game._moved("right") == [[0, 0, 4, 8], [0, 0, 4, 4], [0, 0, 0, 2], [0, 0, 4, 4]]
    assert game._moved("up") == [[4, 4, 4, 8], [2, 0, 4, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert game._moved("down") == [[0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 4, 8], [4, 4, 4, 4]]
    game.board = [[2, 4, 8, 16]] * 4
    assert play(game, "left").startswith("Nothing moves that way.")
    game.board = [[1024, 1024, 0, 0], *[[0] * 4] * 3]
    play(game, "left")
    assert game.get_reward() == 1.0


def test_tic_tac_toe():
    """The fixed player takes a win, prevents one, and can be beaten."""
    game, _ = begun(TicTacToe)
    game.board = list("OO34X6X89")
    assert play(game, "9") is None
    assert "".join(game.board) == "OOO4X6X8X"
    assert game.get_reward() == 0.0
    game, _ = begun(TicTacToe)
    game.board = list("X23O56789")
    play(game, "2")
    assert game.board[2] == "O"
    assert play(game, "2").startswith("That is no free place.")
    outcomes = set()
    for seed in range(60):
        game, answer = begun(TicTacToe, str(seed))
        draw = random.Random(seed)
        while answer is not None:
            answer = play(game, draw.choice([place for place in game.board if place.isdigit()]))
        outcomes.add(game.get_reward())
    assert outcomes == {0.0, 0.5, 1.0}
