"""docs/tools.md: its tool, its environment and its game, in processes as in a run."""

import re

import documentation
import pytest

from mindrlhf.configs.images import ImageSettings
from mindrlhf.environments.pool import EnvironmentPool

PAGE = "docs/tools.md"
KEY = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    for block in documentation.blocks(PAGE):
        if name := re.match(r"# (\w+\.py)\n", block.text):
            (folder / name[1]).write_text(block.text)
    return folder


def answers(pool, name, *requests):
    """The answers to reset and to each request (method, argument); then the reward."""
    pool.reset(KEY, name, {"question": "How much?", "seed": "3"})
    found = [answered(pool)]
    for method, value in requests:
        getattr(pool, method)(KEY, value)
        found.append(answered(pool))
    pool.reward(KEY)
    return *found, answered(pool)


def answered(pool):
    (outcome,) = pool.collect(wait_for_one=True)
    return [answer.value for answer in outcome.answers]


def test_a_tool(folder):
    with EnvironmentPool({"": ""}, [f"{folder}/weather.py:temperature", "calculator"]) as pool:
        assert [schema["function"]["name"] for schema in pool.schemas[""]] == ["temperature", "calculator"]
        calls = [("temperature", {"city": "Oslo"}), ("calculator", {"expression": "2 * 21"})]
        assert answers(pool, "", ("call", calls))[1] == ["4.5", "42"]


def test_a_tool_that_answers_with_an_image(folder):
    settings = ImageSettings()
    with EnvironmentPool({"": ""}, [f"{folder}/paint.py:paint"], images=settings) as pool:
        _, ((before, picture, behind),), _ = answers(pool, "", ("call", [("paint", {"colour": "red"})]))
        assert (before, behind) == ("This is", "and it is red.")
        assert picture.pixels.shape == (56, 56, 3)
        assert (picture.pixels == (255, 0, 0)).all()


def test_an_environment(folder):
    with EnvironmentPool({"shop": f"{folder}/shop.py:Shop"}) as pool:
        calls = [("price", {"article": "pear"}), ("sell", {"article": "pear", "count": 2})]
        assert answers(pool, "shop", ("call", calls)) == ([None], ["5", "sold"], [1.0])


def test_a_game(folder):
    with EnvironmentPool({"higher": f"{folder}/higher.py:Higher"}) as pool:
        guesses = [("reply", f"Is it {number}?") for number in range(1, 11)]
        opening, *said, reward = answers(pool, "higher", *guesses)
        assert opening == ["I think of a number from 1 to 10."]
        number = said.index([None]) + 1
        assert said == [["higher"]] * (number - 1) + [[None]] + [["lower"]] * (10 - number)
        assert reward == [float(number == 10)]
